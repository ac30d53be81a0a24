"""GGUF files: metadata, errors, and limits of memory."""

import os
from collections.abc import Callable
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any

import pytest

from paceline.engines import EngineSettings, open_engine
from paceline.errors import ModelError
from paceline.models import Progress, resolve
from paceline.models.gguf import support
from support.errors import raises
from support.tiny import write_tiny

# -- files that are none ---------------------------------------------------------------------------


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[Path], str]:
    """Return the error of a bad file, which names the file; nothing may be left behind."""

    def refused(path: Path) -> str:
        with pytest.raises(ModelError) as caught:
            resolve(str(path), tmp_path / "cache")
        message = str(caught.value)
        assert str(path) in message
        assert "\n" not in message
        assert not [*(tmp_path / "cache" / "models").iterdir()]
        return message

    return refused


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_is_rejected_without_waiting(refused: Any, tmp_path: Path):
    for name in ("pipe.gguf", "manifest.json"):
        os.mkfifo(tmp_path / name)
    assert "is not a file" in refused(tmp_path / "pipe.gguf")
    assert "manifest.json is not a file" in refused(tmp_path)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokenizer.ggml.tokens": None}, "no tokenizer: tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "tokenizer of kind gpt2/kimi-k2"),
        ({"llama.context_length": 0}, "has no context length"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokens is not a list of text"),
        ({"tokenizer.ggml.merges": ["t h", "nonsense q"]}, "the merge 'nonsense q'"),
    ],
)
def test_a_file_with_missing_metadata_is_rejected(
    fields: dict[str, Any], reason: str, refused: Any, tmp_path: Path
):
    assert reason in refused(write_tiny(tmp_path / "bad.gguf", fields=fields))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        *(("block_count", None, "block_count"), ("block_count", 3, "blk.2.attn_norm")),
        ("attention.head_count", 6, "wrong shape"),
        ("attention.head_count", 3, "head_count of 3; expected 2 to 2147483648, a multiple of 2"),
        ("attention.layer_norm_rms_epsilon", 0.0, "epsilon of 0.0; expected 1e-30 to"),
        ("rope.dimension_count", 18, "count of 18; expected 2 to 16, a multiple of 2"),
        *(("rope.scaling.factor", nan, "of nan"), ("rope.scaling.type", "magic", "of 'magic'")),
    ],
)
def test_contradictory_metadata_is_rejected_when_opening(
    name: str, value: Any, reason: str, tmp_path: Path
):
    path = write_tiny(tmp_path / "bad.gguf", fields={f"llama.{name}": value})
    files = resolve(str(path), tmp_path)
    with raises(ModelError, path, reason):
        open_engine("llamacpp", files.path, files.context_length, EngineSettings())


@pytest.mark.parametrize("place", [8, 23, 0.02, 0.3, -5000, -1])
def test_a_file_truncated_anywhere_is_rejected_as_truncated(
    place: float, tiny_gguf: Path, refused: Any, tmp_path: Path
):
    whole = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(place if abs(place) >= 1 else place * len(whole))])
    assert "truncated" in refused(path)


@pytest.mark.parametrize("split", [0, 8])
def test_a_file_larger_than_memory_is_rejected_before_reading(
    split: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_tiny(tmp_path / "m.gguf", split=split)
    total = sum(result.stat().st_size for result in tmp_path.glob("*.gguf"))
    monkeypatch.setattr(support, "memory_bytes", lambda: total - 1)
    with raises(ModelError, "memory"):
        resolve(str(path), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_file_that_may_not_fit_opens_with_a_warning(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    size, output = tiny_gguf.stat().st_size, StringIO()
    monkeypatch.setattr(support, "memory_bytes", lambda: int(1.1 * size))
    resolve(str(tiny_gguf), tmp_path / "cache", Progress(output))
    assert "of memory, but this machine has" in output.getvalue().splitlines()[0]
    monkeypatch.setattr(support, "memory_bytes", lambda: 2 * size)
    output = StringIO()
    resolve(str(tiny_gguf), tmp_path / "cache", Progress(output))
    assert output.getvalue() == ""
