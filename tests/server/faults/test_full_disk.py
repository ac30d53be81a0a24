"""A disk that fails under the prompt cache: the same tokens, and the KV stays in memory."""

import errno
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from paceline.models import ModelFiles
from paceline.runtime.batching.prompt_store import PromptStore
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.server.settings import Settings
from support.server import Running, running

pytestmark = pytest.mark.slow

PROMPTS = [
    " ".join(f"{word} {number % most}" for number, word in enumerate(["the", "rain", "a"] * 31))
    for most in (7, 5)
]
SETTINGS = Settings(prompt_cache_bytes=1 << 30)
OPERATIONS = {
    **dict.fromkeys(("mkdir", "touch", "glob", "write_bytes", "replace"), Path),
    **dict.fromkeys(("read_bytes", "stat", "unlink"), Path),
    "utime": os,
}


@pytest.fixture(scope="module")
def loaded(tiny_ir: ModelFiles, tiny_cache: Path) -> Model:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tiny_cache))
        model = load(tiny_ir.path, cache_tokens=2048)
        model.compared()
    return model


def answers(server: Running) -> list[str]:
    """The answer to each prompt, each asked twice; the second time memory has the KV."""
    texts = []
    for prompt in PROMPTS:
        for again in (False, True):
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
            reply = server.post("/v1/completions", body).json()
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 300 or not again, "memory lost the KV of the prompt"
            texts.append(reply["choices"][0]["text"])
    return texts


class Disk(NamedTuple):
    """A folder of prompts, and a model that may find them there."""

    prompts: Path
    loaded: Model
    texts: list[str]

    def check(self) -> None:
        """A server that begins now, with nothing in memory, answers as without a disk."""
        with running(Model(self.loaded.files, self.loaded.engine), SETTINGS) as server:
            assert answers(server) == self.texts


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: Model) -> Disk:
    """It has the first prompt and not the second."""
    with running(Model(loaded.files, loaded.engine)) as server:
        texts = answers(server)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    with running(Model(loaded.files, loaded.engine), SETTINGS) as server:
        server.post("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 1})
    assert [*tmp_path.glob("prompts/*/*.kv")]
    return Disk(tmp_path / "prompts", loaded, texts)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_disk_error_at_any_operation_changes_no_answer_and_is_one_line(
    operation: str,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    owner: Any = OPERATIONS[operation]
    original = getattr(owner, operation)
    number = errno.ENOSPC if operation in ("write_bytes", "replace") else errno.EIO
    failed = []

    def fail(path: Any, *arguments: Any, **options: Any) -> Any:
        if disk.prompts in (path, *Path(path).parents):
            failed.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *arguments, **options)

    if operation == "unlink":  # only files that are damaged are removed
        for path in disk.prompts.glob("*/*.kv"):
            path.write_bytes(b"damaged")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(owner, operation, fail)
        disk.check()
    assert failed or operation == "touch"
    lines = [record.getMessage() for record in caplog.records if record.name != "uvicorn.error"]
    assert len(lines) <= (2 if operation == "unlink" else 1), lines
    disk.check()  # it works again


def test_what_a_killed_server_left_half_written_is_removed(disk: Disk):
    (path, *_) = disk.prompts.glob("*/*.kv")
    left, others = (path.with_name(f".{path.name}.{number}") for number in (1, 2))
    for item in (left, others):
        item.write_bytes(path.read_bytes()[:100])
    os.utime(left, (1, 1))
    PromptStore(disk.prompts, disk.loaded.engine, "model", 1 << 30)
    assert not left.exists()
    assert others.exists(), "another server may be writing it"


def test_a_writer_that_fails_otherwise_ends_the_keeping_with_one_line(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(_arrays: dict[str, np.ndarray]) -> bytes:
        raise MemoryError("no memory")

    monkeypatch.setattr("safetensors.numpy.save", fail)
    disk.check()
    assert len(caplog.records) == 1, caplog.text
