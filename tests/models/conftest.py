from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.models import ModelFiles
from support.checkpoints import write_checkpoint
from support.fake_hub import FakeHub, serving, use_hub


@pytest.fixture(autouse=True)
def nothing_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No models of other programs: what they have on this machine is none of a test's business."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "no-ollama"))


@pytest.fixture
def exported(tiny_files: ModelFiles, tmp_path: Path) -> Path:
    """A checkpoint's folder, without weights that could be run."""
    return write_checkpoint(tmp_path / "exported", tiny_files)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub without models: the only one that is asked."""
    with serving() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        yield hub
