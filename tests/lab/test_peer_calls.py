"""Calls, prompts, start and memory of several runtimes on one file, each in its own process."""

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.models import QUIET
from paceline_lab.bench.record import Record, parse_record, read_record
from paceline_lab.peers import registry
from paceline_lab.peers.calls import command, runtimes
from paceline_lab.peers.calls.processes import Worker, anonymous_bytes, drop_page_cache
from paceline_lab.report.command import bench_report

FACTS = {"engine": {"engine": "toy"}, "fingerprint": "abc"}
BROKEN = 3
"""A number of threads with which one of the peers fails."""


class Fake:
    """A worker of made-up times: paceline's calls take half of the others'."""

    asked: list[tuple[str, Mapping[str, int]]]
    started: list[Mapping[str, Any]]

    def __init__(self, wanted: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self.name, self.ready = wanted["runtime"], {"packages": [], "facts": FACTS}
        Fake.started.append({**wanted, "cache": env["PACELINE_CACHE"]})
        self.ready_seconds = float(len(Fake.started))
        self.peak_bytes = 2_000_000
        if self.name == "llama-cpp-python" and wanted["threads"] == BROKEN:
            raise ModelError("llama.cpp cannot run this model")

    def ask(self, task: Mapping[str, int]) -> float | None:
        Fake.asked.append((self.name, task))
        if self.name == "openvino-genai" and task.get("rows", 1) > 1:
            return None
        each = 1.0 if "prompt" in task else 0.01 * task["rows"]
        return each * (1 if self.name == "paceline" else 2)

    def __enter__(self) -> "Fake":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.asked, Fake.started = [], []
    monkeypatch.setattr(command, "Worker", Fake)
    monkeypatch.setattr(command, "check_names", lambda _: None)
    return Fake


def bench(gguf: Path, **more: Any) -> Record:
    options: dict[str, Any] = {"peers": [], "threads": 2, "rounds": 3, "progress": QUIET, **more}
    report = command.bench_calls(str(gguf), **options)
    for _, head, lines in report.tables:
        assert lines
        assert all(len(line) == len(head) for line in lines)
    return parse_record(json.loads(json.dumps(report.value)), "it")


def test_every_runtime_makes_every_call_in_turn(fakes: type[Fake], tiny_gguf: Path):
    record = bench(tiny_gguf)
    assert record.contenders == ["paceline", "llama-cpp-python", "openvino-genai"]
    first = [name for name, task in fakes.asked if task.get("rows") == 1]
    assert len(first) == 9
    assert first[:3] != first[3:6], "another one begins each round"
    by = {(row.kind, row.contender): row for row in record.rows}
    assert by["8 rows", "llama-cpp-python"].measures["ratio"] == [0.5] * 3
    assert by["8 rows", "llama-cpp-python"].at == {"rows": 8, "threads": 2}
    assert ("1 row", "openvino-genai") in by
    assert ("8 rows", "openvino-genai") not in by, "it has no such calls"
    prompt = by[f"prompt of {command.PROMPT}", "paceline"]
    assert prompt.measures["prefill_tokens_per_second"] == [command.PROMPT] * 3
    assert by["start", "paceline"].measures == {
        "cold_seconds": [1.0],
        "warm_seconds": [2.0],
        "peak_anonymous_bytes": [2_000_000.0],
    }
    assert record.summary["8 rows, 2 threads"]["paceline"]["seconds"] == pytest.approx(0.08)
    assert record.engine == {"engine": "toy"}


def test_the_first_start_has_an_empty_cache_and_the_second_what_the_first_made(
    fakes: type[Fake], tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "cpu_cores", lambda: 4)
    bench(tiny_gguf, peers=["llama-cpp-python"], threads=None)
    assert [each["threads"] for each in fakes.started] == [2] * 4 + [4] * 4
    caches = {each["threads"]: each["cache"] for each in fakes.started}
    assert len({str(cache), *caches.values()}) == 3
    assert all(each["cache"] == caches[each["threads"]] for each in fakes.started)


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [2]), (4, [2, 4]), (6, [2, 4, 6]), (16, [2, 4, 8, 16])]
)
def test_threads_are_powers_of_two_and_all_cores(cores: int, counts: list[int]):
    assert command.thread_counts(cores) == counts


@pytest.mark.usefixtures("fakes")
def test_a_peer_that_cannot_run_the_model_is_left_out(tiny_gguf: Path):
    record = bench(tiny_gguf, threads=BROKEN)
    assert record.contenders == ["paceline", "openvino-genai"]


def test_peers_without_calls_and_peers_that_are_not_installed_are_refused(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(InvalidRequest, match="not with transformers"):
        bench(tiny_gguf, peers=["transformers"])
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match="pip install llama-cpp-python"):
        bench(tiny_gguf, peers=["llama-cpp-python"])
    with pytest.raises(MissingExtra, match="no peer is installed"):
        bench(tiny_gguf)


def test_options_for_prompts_do_not_go_with_calls(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "peers", "--calls", "--kind", "chat"]) == 2
    assert "--calls has no prompts" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_measures_real_runtimes(tiny_gguf: Path, cache: Path, tmp_path: Path):
    pytest.importorskip("openvino_genai")
    output = tmp_path / "calls.json"
    asked = ["bench", "peers", "--calls", "--peer", "openvino-genai", "--model", str(tiny_gguf)]
    assert main([*asked, "--rounds", "1", "--threads", "1", "--output", str(output)]) == 0
    record = read_record(output)
    by = {(row.kind, row.contender): row.measures for row in record.rows}
    assert by["16 rows", "paceline"]["seconds"][0] > 0
    assert by["1 row", "openvino-genai"]["ratio"][0] > 0
    start = by["start", "paceline"]
    assert start["cold_seconds"][0] > 0
    if sys.platform == "linux":
        assert start["peak_anonymous_bytes"][0] > tiny_gguf.stat().st_size
    assert record.engine is not None
    assert record.engine["threads"] == "1"
    bench_report([output], tmp_path / "report.html")


def test_a_runtime_that_fails_is_an_error_with_its_last_line(tmp_path: Path):
    missing = tmp_path / "nothing.gguf"
    wanted = {"runtime": "paceline", "gguf": str(missing), "threads": 1, "context": 64}
    with pytest.raises(ModelError, match=r"paceline cannot run this model: .*nothing\.gguf"):
        Worker(wanted, os.environ)


def test_memory_is_read_and_the_page_cache_dropped(tiny_gguf: Path):
    held = bytearray(os.urandom(1 << 20) * 16)
    if sys.platform == "linux":
        assert anonymous_bytes(os.getpid()) > len(held)
    assert anonymous_bytes(2**22 + 1) == 0, "no such process"
    before = tiny_gguf.read_bytes()
    drop_page_cache(tiny_gguf)
    assert tiny_gguf.read_bytes() == before


def test_llama_cpp_is_asked_for_all_rows_of_a_block_after_the_context(
    monkeypatch: pytest.MonkeyPatch,
):
    decoded: list[tuple[list[int], int]] = []

    class Library(ModuleType):
        """The low-level functions that are used, with a batch like theirs."""

        def __getattr__(self, name: str) -> Any:
            return lambda *_: SimpleNamespace()

        def llama_batch_init(self, rows: int, *_: int) -> Any:
            columns = {name: [0] * rows for name in ("token", "pos", "n_seq_id", "logits")}
            return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(rows)], **columns)

        def llama_vocab_n_tokens(self, _: object) -> int:
            return 4

        def llama_decode(self, _: object, batch: Any) -> int:
            count = batch.n_tokens
            decoded.append((batch.pos[:count], sum(batch.logits[:count])))
            return 0

        def llama_get_logits_ith(self, *_: object) -> Any:
            return ctypes.cast((ctypes.c_float * 4)(), ctypes.POINTER(ctypes.c_float))

    monkeypatch.setitem(sys.modules, "llama_cpp", Library("llama_cpp"))
    runtime = runtimes.LlamaCpp(Path("model.gguf"), threads=2, context=600)
    decoded.clear()
    assert runtime.rows(4) is not None
    assert decoded == [(list(range(128, 132)), 4)]
    decoded.clear()
    runtime.prompt(runtimes.prompt_of(600))
    assert [(len(places), wanted) for places, wanted in decoded] == [(512, 0), (88, 1), (128, 1)]
