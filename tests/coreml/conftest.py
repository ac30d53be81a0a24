import sys
from pathlib import Path

import pytest

from support.packages import missing

# They read files, or skip what needs packages by themselves.
WITHOUT_CORE_ML = {
    *("test_artifact.py", "test_compute_units.py", "test_entities.py", "test_rehearsal_rows.py"),
    "test_residency.py",
}
FOLDER = Path(__file__).parent
collect_ignore = [
    str(path.relative_to(FOLDER))
    for path in FOLDER.rglob("test_*.py")
    if missing("coreml") and path.name not in WITHOUT_CORE_ML
]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Starting threads takes longer than tensors as small as these."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
