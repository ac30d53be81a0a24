"""Whether a model fits the memory: said before it is read."""

from io import StringIO
from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.models import Progress, resolve
from paceline.models.gguf import support
from support.errors import raises
from support.tiny import write_tiny


@pytest.mark.parametrize("split", [0, 8])
def test_a_file_larger_than_the_memory_is_refused_before_it_is_read(
    split: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_tiny(tmp_path / "m.gguf", split=split)
    total = sum(result.stat().st_size for result in tmp_path.glob("*.gguf"))
    monkeypatch.setattr(support, "memory_bytes", lambda: total - 1)
    with raises(ModelError, "memory"):
        resolve(str(path), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_file_that_may_not_fit_is_opened_after_a_line(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    size, output = tiny_gguf.stat().st_size, StringIO()
    monkeypatch.setattr(support, "memory_bytes", lambda: int(1.1 * size))
    resolve(str(tiny_gguf), tmp_path / "cache", Progress(output))
    assert "of memory, and this machine has" in output.getvalue().splitlines()[0]
    monkeypatch.setattr(support, "memory_bytes", lambda: 2 * size)
    output = StringIO()
    resolve(str(tiny_gguf), tmp_path / "cache", Progress(output))
    assert output.getvalue() == ""
