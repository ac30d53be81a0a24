from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.models import ModelFiles
from support.checkpoints import write_checkpoint
from support.fake_hub import FakeHub, serving, use_hub


@pytest.fixture(autouse=True)
def nothing_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the models of other programs on this machine."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "no-ollama"))


@pytest.fixture
def exported(tiny_files: ModelFiles, tmp_path: Path) -> Path:
    """A checkpoint's folder without usable weights."""
    return write_checkpoint(tmp_path / "exported", tiny_files)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty fake hub, the only one in use."""
    with serving() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        yield hub
