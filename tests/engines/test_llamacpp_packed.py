"""Packed copies of weights: made once per version of a file, and never a reason to fail."""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines.base import EngineSettings
from paceline.engines.llamacpp import packed
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.storage.gguf_file import read_gguf
from paceline.storage.progress import QUIET, Progress
from support.llamacpp import library
from support.tiny import Type, write_tiny

TOKENS = np.random.default_rng(1).integers(3, 250, 64).tolist()

Opened = tuple[bool, bytes]
"""Whether packed weights were used, and the logits of a block."""


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Opened]:
    monkeypatch.setattr(packed, "_MIN_BYTES", 0)

    def opened(path: Path, progress: Progress = QUIET) -> Opened:
        settings = EngineSettings(threads=1, packed=tmp_path / "copies", progress=progress)
        engine = LlamaCppEngine(path, 256, settings, binding=library("ik_llama.cpp"))
        with closing(engine), closing(engine.open()) as sequence:
            logits = engine.step([(sequence, Block(TOKENS, 4, prefill=True))]).logits[0]
            return "packed" in engine.describe()["rows"], logits.tobytes()

    return opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "m.gguf", weights=Type.Q8_0)


def names(tmp_path: Path) -> list[str]:
    return sorted(file.suffix for file in (tmp_path / "copies").iterdir())


def test_a_packed_copy_is_made_once(opened: Callable[..., Opened], path: Path, tmp_path: Path):
    first = opened(path)
    assert first[0]
    assert names(tmp_path) == [".gguf", ".source"]
    by_name = {file: file.stat().st_mtime_ns for file in (tmp_path / "copies").iterdir()}
    assert opened(path) == first
    assert {file: file.stat().st_mtime_ns for file in by_name} == by_name


def test_a_changed_file_gets_a_new_copy_and_the_old_one_is_deleted(
    opened: Callable[..., Opened], path: Path, tmp_path: Path
):
    first = opened(path)
    write_tiny(path, weights=Type.Q8_0, seed=5)
    os.utime(shutil.copy(path, tmp_path / "copies/.partial-1-m.gguf"), (0, 0))  # by one killed
    second = opened(path)
    assert second[0]
    assert second[1] != first[1]
    assert names(tmp_path) == [".gguf", ".source"]
    assert opened(path.rename(tmp_path / "other.gguf")) == second  # its first name is gone
    assert names(tmp_path) == [".gguf", ".source"]


def no_room(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    usage = shutil.disk_usage("/")._replace(free=1)
    monkeypatch.setattr(packed.shutil, "disk_usage", lambda _: usage)


def no_folder(_: pytest.MonkeyPatch, folder: Path) -> None:
    folder.write_text("a file where the folder should be")


def no_process(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


def failing_process(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")


def endless_process(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    script = folder.with_name("endless")
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(packed, "_SECONDS", 0.3)


@pytest.mark.skipif(os.name == "nt", reason="the faults are programs of a Unix system")
@pytest.mark.parametrize(
    "fault", [no_room, no_folder, no_process, failing_process, endless_process]
)
def test_any_packing_failure_falls_back_to_the_file(
    fault: Callable[[pytest.MonkeyPatch, Path], None],
    opened: Callable[..., Opened],
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    with monkeypatch.context() as patch:
        fault(patch, tmp_path / "copies")
        is_packed, logits = opened(path)
    assert not is_packed
    assert logits
    assert not [*tmp_path.glob("copies/*.gguf"), *tmp_path.glob("copies/.partial*")]


@pytest.mark.parametrize("size", [0, 100, -200])
def test_a_corrupt_copy_is_neither_used_nor_rebuilt(
    size: int, opened: Callable[..., Opened], path: Path, tmp_path: Path
):
    assert opened(path)[0]
    (copy,) = tmp_path.glob("copies/*.gguf")
    os.truncate(copy, size if size >= 0 else copy.stat().st_size + size)
    assert not opened(path)[0]
    assert not copy.exists()
    assert not opened(path)[0]


@pytest.mark.parametrize("weights", [Type.F16, Type.Q4_1])
def test_weights_without_a_packed_format_are_used_unchanged(
    weights: Type, opened: Callable[..., Opened], tmp_path: Path
):
    path = write_tiny(tmp_path / "m.gguf", weights=weights)
    assert not opened(path)[0]
    assert names(tmp_path) == [".none"]


def test_expert_weights_are_not_packed(path: Path):
    binding, content = library("ik_llama.cpp"), read_gguf(path)
    experts = content.tensors[0]._replace(name="blk.0.ffn_up_exps.weight")
    assert binding.packs(content)
    assert not binding.packs(replace(content, tensors=[*content.tensors, experts]))


def test_one_time_work_is_shown(opened: Callable[..., Opened], path: Path):
    said = StringIO()
    assert opened(path, Progress(said))[0]
    assert opened(path, Progress(said))[0]
    begun = [line.partition(" ")[0] for line in said.getvalue().splitlines()]
    assert begun == ["packing", "measuring", "measuring"], "nothing keeps measurements"


def test_small_files_are_not_packed(path: Path, tmp_path: Path):
    settings = EngineSettings(threads=1, packed=tmp_path / "copies")
    LlamaCppEngine(path, 256, settings, binding=library("ik_llama.cpp")).close()
    assert names(tmp_path) == []
