"""Harmful grammars: limits of time and memory, per grammar."""

import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.constraints import matcher, matcher_process
from paceline.constraints.grammar import Grammars
from paceline.constraints.matcher_process import Caller, MatcherProcesses
from paceline.errors import Busy, InvalidRequest
from paceline.models import ModelFiles
from paceline.system.processes import WorkerProcess
from support.errors import raises
from support.grammars import COLUMNS, PERSON, STOPS, allowed
from support.waiting import PATIENCE, until

pytest.importorskip("llguidance")

# An intersection of four with a derivative larger than any memory.
MULTIPLES = {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]}
SPLIT = r"((.|\n){0,99}e){99}/ & /((.|\n){0,99}t){99}(.|\n)*/ & /((.|\n){0,99}a){99}(.|\n)*"
MEETING = f"start: T\nT: /{SPLIT}/"
AMBIGUOUS = "start: s\ns: s s | s s s | /./ | /../ | /.../"
"""Each of its masks takes longer than the one before, up to llguidance's limit."""


@pytest.fixture
def fresh(tiny_files: ModelFiles) -> Iterator[Grammars]:
    """Grammars with separate processes and without cached results."""
    path = tiny_files.folder / "tokenizer.json"
    grammars = Grammars(path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    grammars.json_object()
    yield grammars
    grammars._processes._compiling.close()
    grammars._processes._matching.close()


def text_of(grammars: Grammars, count: int, constraint: Any) -> list[int]:
    """Return the first tokens of a response: the pseudo-random best of the allowed ones."""
    tokens = []
    for row in np.random.default_rng(7).normal(size=(count, COLUMNS)).astype(np.float32):
        tokens.append(int(constraint.masked(row).argmax()))
        constraint.push(tokens[-1])
    return tokens


def child_of(process: WorkerProcess) -> int:
    """Return the process id of the worker's child."""
    assert process._child is not None
    pid = process._child.pid
    children: list[str] = []

    def has_child() -> bool:
        children[:] = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
        return bool(children)

    until(has_child)
    return int(children[0])


def stopped(process: WorkerProcess) -> int:
    """Stop the worker's child thread by thread, and return its process id."""
    child = child_of(process)
    os.kill(child, signal.SIGSTOP)
    threads = Path(f"/proc/{child}/task")
    until(lambda: all(state_of(thread)[0] == "T" for thread in threads.iterdir()))
    return child


def state_of(folder: Path) -> list[str]:
    return (folder / "stat").read_text(encoding="ascii").rpartition(")")[2].split()


def cpu_seconds(process: int) -> float:
    fields = state_of(Path(f"/proc/{process}"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("grammar", [MULTIPLES, MEETING], ids=["multiples", "intersection"])
def test_a_grammar_that_compiles_too_slowly_is_rejected_and_not_retried(
    grammar: Any, fresh: Grammars, monkeypatch: pytest.MonkeyPatch
):
    make = fresh.lark if isinstance(grammar, str) else fresh.json_schema
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not the kernel's figure for ended children, which has the size of this process at the fork.
    compiling = child_of(fresh._processes._compiling)
    assert resource.prlimit(compiling, resource.RLIMIT_AS) == (1.75 * 2**30, 1.75 * 2**30)
    with raises(InvalidRequest):
        make(grammar)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 2**10
    ask, asked = matcher_process.MatcherProcesses._ask, [""]

    def record(self: MatcherProcesses, process: WorkerProcess, request: Any, *more: Any) -> Any:
        asked.append(request["grammar"])
        return ask(self, process, request, *more)

    monkeypatch.setattr(matcher_process.MatcherProcesses, "_ask", record)
    with raises(InvalidRequest, "compile"):
        make(grammar)
    assert max(map(len, asked)) < 100  # no more than bounds alone


def test_a_grammar_that_exceeds_the_memory_limit_is_rejected(
    fresh: Grammars, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(matcher_process, "COMPILE_SECONDS", 99.0)
    compiling = child_of(fresh._processes._compiling)
    pages = int(Path(f"/proc/{compiling}/statm").read_text("ascii").split()[0])
    limit = pages * resource.getpagesize() + 2**26  # the whole of it takes half a minute to fill
    resource.prlimit(compiling, resource.RLIMIT_AS, (limit, limit))
    with raises(InvalidRequest, "memory"):
        fresh.json_schema(MULTIPLES)
    assert allowed(fresh.json_schema(PERSON))


def test_grammars_match_while_another_one_compiles(fresh: Grammars):
    constraint = fresh.json_schema(PERSON)
    constraint.masked(np.zeros(COLUMNS, np.float32))
    compiling = stopped(fresh._processes._compiling)  # as if it compiled for hours
    try:
        assert text_of(fresh, 30, constraint)
    finally:
        os.kill(compiling, signal.SIGCONT)


def test_a_new_grammar_waits_for_a_limited_time_but_a_cached_one_does_not(fresh: Grammars):
    assert allowed(fresh.json_schema(PERSON))
    compiling = stopped(fresh._processes._compiling)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fresh.regex, "[ab]")
        until(fresh._processes._turn.locked)
        with raises(Busy):
            fresh.for_caller(Caller(seconds=0.05)).regex("[cd]")
        assert allowed(fresh.json_schema(PERSON))
        os.kill(compiling, signal.SIGCONT)
        assert allowed(first.result(PATIENCE))


def test_compilation_ends_when_its_request_is_cancelled(
    fresh: Grammars, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(matcher_process, "COMPILE_SECONDS", PATIENCE)
    compiling, caller = child_of(fresh._processes._compiling), Caller()
    with ThreadPoolExecutor(1) as pool:
        harmful = pool.submit(fresh.for_caller(caller).lark, MEETING)
        until(lambda: cpu_seconds(compiling) > 0.1)
        caller.interrupt.request()
        with pytest.raises(Busy):
            harmful.result(PATIENCE)
    until(lambda: not Path(f"/proc/{compiling}").exists())
    assert allowed(fresh.regex("[ab]"))
    monkeypatch.setattr(matcher_process, "COMPILE_SECONDS", 0.5)
    with raises(InvalidRequest, "compile"):  # it was not taken for harmful
        fresh.lark(MEETING)


def test_a_worker_killed_at_a_limit_restarts_without_rereading_the_vocabulary(fresh: Grammars):
    process = fresh._processes._compiling
    parent, child = process._child, child_of(process)
    with raises(InvalidRequest, "compile"):
        fresh.lark(MEETING)
    assert allowed(fresh.regex("[ab]"))
    assert child_of(process) != child
    assert process._child is parent, "it was started again"


def test_a_worker_that_died_while_idle_does_not_fail_the_next_grammar(fresh: Grammars):
    process = fresh._processes._compiling
    child = child_of(process)
    os.kill(child, signal.SIGKILL)  # as the kernel does without memory
    until(lambda: child_of(process) != child)
    assert allowed(fresh.regex("[ab]"))


def test_a_slow_grammar_step_ends_only_its_own_response(
    fresh: Grammars, monkeypatch: pytest.MonkeyPatch
):
    expected = text_of(fresh, 40, fresh.json_schema(PERSON))
    other, harmful = fresh.json_schema(PERSON), fresh.lark(AMBIGUOUS)
    assert allowed(other)
    assert allowed(harmful)
    monkeypatch.setattr(matcher_process, "STEP_SECONDS", 0.001)
    with raises(InvalidRequest, "0.001 s"):
        text_of(fresh, 500, harmful)
    monkeypatch.setattr(matcher_process, "STEP_SECONDS", 5.0)
    assert text_of(fresh, 40, other) == expected
    with raises(InvalidRequest):
        allowed(fresh.lark(AMBIGUOUS))


@pytest.mark.parametrize("place", [0, 17])
def test_a_response_continues_after_its_grammar_worker_crashes(fresh: Grammars, place: int):
    expected = text_of(fresh, 40, fresh.json_schema(PERSON))
    constraint = fresh.json_schema(PERSON)
    tokens = []
    for at, row in enumerate(np.random.default_rng(7).normal(size=(40, COLUMNS))):
        tokens.append(int(constraint.masked(row.astype(np.float32)).argmax()))
        if at == place:
            fresh._processes._matching.close()
        constraint.push(tokens[-1])
    assert tokens == expected


def test_matchers_are_closed_when_their_responses_end(fresh: Grammars):
    for _ in range(3):
        assert allowed(fresh.json_schema(PERSON))
    last = fresh.json_schema(PERSON)
    assert allowed(last)
    assert len(fresh._processes._closed) <= 1


def test_a_response_whose_masks_take_too_long_in_total_ends(
    fresh: Grammars, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(matcher, "_SECONDS", 0.05)
    monkeypatch.setattr(matcher, "_TOKEN_SECONDS", 0.0)
    with raises(InvalidRequest, "simplify"):
        text_of(fresh, 500, fresh.lark(AMBIGUOUS))
