"""Truncated and corrupted GGUF files: they load, or fail with one line.

Each is loaded and run in a process that must outlive it, within bounds of time and memory.
"""

import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.storage.gguf_file import read_gguf
from support.waiting import PATIENCE

WORKER = Path(__file__).parents[2] / "support" / "open_gguf.py"
EXAMPLES = int(os.environ.get("PACELINE_FUZZ", "25"))
"""More of them: PACELINE_FUZZ=1000 pytest tests/models/gguf/test_gguf_fuzz.py."""
SECONDS = 60.0
"""Of processor time on all cores; the whole file takes about one."""
KILOBYTES = 1_000_000
"""Most memory of the process at its peak; it has 300,000 with the whole file."""

NUMBERS = [0, 1, 2, 3, 7, 2**8, 2**15, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
FLOATS = [0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan")]


class Worker:
    """A process of `open_gguf.py`, started again after a crash."""

    def __init__(self, cache: Path) -> None:
        self._environment = {**os.environ, "PACELINE_CACHE": str(cache)}
        self._child: subprocess.Popen[str] | None = None

    def open(self, path: Path) -> dict[str, Any]:
        """Return its report on the file; `fault` if it crashed or did not end."""
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=self._environment,
            )
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        watch = threading.Timer(PATIENCE, child.kill)
        watch.start()
        try:
            child.stdin.write(f"{path}\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if line:
            told: dict[str, Any] = json.loads(line)
            return told
        self.close()
        return {"fault": f"the process ended with {child.returncode}"}

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    process = Worker(tmp_path_factory.mktemp("cache"))
    yield process
    process.close()


@pytest.fixture(scope="module")
def places(tiny_gguf: Path) -> Mapping[str, tuple[int, str]]:
    """Name of each number in the metadata -> its place in the file and its `struct` format."""
    content, values = tiny_gguf.read_bytes(), {}
    forms = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q"}
    for name, raw in read_gguf(tiny_gguf).raw.items():
        at = content.index(bytes(raw)) + 8 + len(name.encode())
        kind = struct.unpack_from("<I", content, at)[0]
        if kind in forms:
            values[name] = at + 4, forms[kind]
    assert {"llama.block_count", "llama.context_length", "llama.rope.freq_base"} <= values.keys()
    return values


def other_number(data: st.DataObject, content: bytearray, places: Mapping[str, Any]) -> None:
    """Give a field of the metadata another number."""
    at, form = places[data.draw(st.sampled_from(sorted(places)), label="field")]
    value: Any = data.draw(st.sampled_from(FLOATS if form == "<f" else NUMBERS), label="number")
    if form == "<f":
        value = np.float32(value)
    elif form == "<?":
        value = bool(value % 2)
    else:
        size = struct.calcsize(form)
        value = value % 2 ** (8 * size - (form in ("<i", "<q")))
    struct.pack_into(form, content, at, value)


def cut(data: st.DataObject, content: bytearray) -> None:
    """Remove the end, or a part."""
    begin = data.draw(st.integers(0, len(content) - 1), label="from")
    to_end = data.draw(st.booleans())
    del content[begin : None if to_end else begin + data.draw(st.sampled_from([1, 4, 32, 4096]))]


def flip(data: st.DataObject, content: bytearray, end: int) -> None:
    """Flip up to 8 bits, mostly before `end`."""
    for _ in range(data.draw(st.integers(1, 8))):
        last = end if data.draw(st.integers(0, 3)) else len(content)
        at = data.draw(st.integers(0, min(last, len(content)) - 1), label="at")
        content[at] ^= 1 << data.draw(st.integers(0, 7))


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_corrupted_file_loads_or_is_rejected_in_one_line(
    data: st.DataObject, tiny_gguf: Path, places: Any, worker: Worker, tmp_path: Path
):
    content = bytearray(tiny_gguf.read_bytes())
    end = content.index(b"output_norm.weight") + 100
    for _ in range(data.draw(st.integers(1, 2), label="changes")):
        how = data.draw(st.sampled_from(["number", "cut", "flip"]), label="how")
        if how == "number":
            other_number(data, content, places)
        elif how == "flip":
            flip(data, content, end)
        else:
            cut(data, content)
        if not content or how != "number":  # the places are others
            break
    # A file of its own: models are mapped, and the one before may still be.
    path = tmp_path / f"{uuid4()}.gguf"
    path.write_bytes(content)
    told = worker.open(path)
    path.unlink()
    assert "fault" not in told, told
    assert "\n" not in told.get("error", ""), told
    assert len(told.get("error", "")) < 1000, told
    assert told["seconds"] < SECONDS, told
    assert told["peak"] < KILOBYTES, told


def test_an_intact_file_loads_and_a_crash_is_detected(
    tiny_gguf: Path, worker: Worker, tmp_path: Path
):
    told = worker.open(tiny_gguf)
    assert told["tokens"] > 0
    assert told["peak"] < KILOBYTES
    assert worker._child is not None
    worker._child.kill()
    assert "ended with" in worker.open(tiny_gguf)["fault"]
