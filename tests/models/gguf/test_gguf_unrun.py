"""GGUF files that an engine could open and not run: refused before it tries."""

from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.models import resolve
from paceline.models.gguf import support
from support.errors import raises
from support.tiny import write_tiny
from support.tiny_checkpoints import write_gguf_of


@pytest.mark.parametrize("engine", ["openvino", "llamacpp"])
def test_an_unknown_scaling_of_positions_is_refused_by_name(engine: str, tmp_path: Path):
    """llama.cpp's libraries end the process at it."""
    path = write_tiny(tmp_path / "m.gguf", fields={"llama.rope.scaling.type": "dynamic"})
    with raises(ModelError, "rope.scaling.type", "yarn"):
        resolve(str(path), tmp_path / "cache", engine=engine)


def test_experts_that_openvino_would_unpack_beyond_memory_are_sent_to_the_other_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_gguf_of("gpt_oss-mxfp4", tmp_path / "m.gguf")
    cache = tmp_path / "cache"
    weights = 2 * 3 * 4 * 64 * 128  # layers, matrices, experts, in, out
    monkeypatch.setattr(support, "memory_bytes", lambda: 9 * weights)
    assert resolve(str(path), cache, engine="openvino").path == path
    monkeypatch.setattr(support, "memory_bytes", lambda: 9 * weights - 1)
    with raises(ModelError, "MXFP4", "--engine llamacpp"):
        resolve(str(path), tmp_path / "other", engine="openvino")
    assert resolve(str(path), tmp_path / "other", engine="llamacpp").engine == "llamacpp"
