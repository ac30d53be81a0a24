import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.models import ModelFiles
from paceline.models.manifest import MANIFEST
from paceline.models.names import other_apps
from support.fake_hub import FakeHub, serving, use_hub

CONFIG = {"max_position_embeddings": 512, "eos_token_id": 2, "bos_token_id": 1}


@pytest.fixture(autouse=True)
def nothing_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No models of other programs: what they have on this machine is none of a test's business."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "no-ollama"))
    monkeypatch.setattr(other_apps, "_LM_STUDIO_FOLDERS", ())


@pytest.fixture
def exported(tiny_int8: ModelFiles, tmp_path: Path) -> Path:
    """A whole OpenVINO model as others export it: a config instead of a manifest."""
    folder = tmp_path / "exported"
    shutil.copytree(tiny_int8.folder, folder)
    (folder / MANIFEST).unlink()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub without models: the only one that is asked."""
    with serving() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        yield hub
