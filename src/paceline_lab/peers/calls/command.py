"""`bench peers --calls`: paceline and other runtimes on one GGUF file, interleaved.

In every round all runtimes make the same calls in turn, and a ratio is taken within the round.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from paceline.errors import InvalidRequest, MissingExtra, PacelineError
from paceline.models import Progress, open_origin
from paceline.storage.report import Report, Table
from paceline.storage.system import CACHE_VARIABLE, cpu_cores
from paceline_lab.bench.ab_test import interleaved
from paceline_lab.bench.record import PACKAGES, Record, Row, here
from paceline_lab.peers.base import NotComparable
from paceline_lab.peers.calls.processes import Worker, drop_page_cache
from paceline_lab.peers.registry import check_names

OURS = "paceline"
PEERS = ("llama-cpp-python", "openvino-genai")

ROWS = (1, 2, 4, 8, 16)
PROMPT = 512
"""Tokens."""

_CALLS = 5
"""Timed calls of a turn, whose median counts."""

_START = "start"


def bench_calls(
    name: str,
    *,
    peers: Sequence[str],
    threads: int | None,
    rounds: int,
    progress: Progress,
) -> Report:
    """Calls of 1 to 16 rows, a prompt, start and memory, for every number of threads.

    Args:
        name: a model that comes as a GGUF file.
        peers: names in `PEERS`; none: those that are installed.
        threads: None: several numbers, up to one per core.
        rounds: repetitions of a measurement; one of the start.
        progress: shows what is measured.

    Raises:
        InvalidRequest: a peer has no calls to measure.
        MissingExtra: a named peer is not installed, or without names none is.
        ModelError: the model has no GGUF file, or a runtime cannot run it.
    """
    chosen = _chosen(peers, progress)
    counts = thread_counts(cpu_cores()) if threads is None else [threads]
    rows: list[Row] = []
    ready: dict[str, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-") as work:
        origin = open_origin(name, Path(work), progress)
        gguf = origin.weights
        if not gguf.is_file():
            raise NotComparable(f"{origin.name} is not a GGUF file, which all runtimes can read")
        for count in counts:
            setup = {"gguf": str(gguf), "threads": count, "context": PROMPT}
            cache = Path(work) / f"cache-{count}"
            with ExitStack() as stack:
                workers, start_rows = _start(chosen, setup, cache, stack, progress)
                rows += start_rows
                ready |= {worker.name: worker.ready for worker in workers.values()}
                rows += _measure(workers, count, rounds, progress)
                _add_peaks(rows, workers)
        size = gguf.stat().st_size
    engine, fingerprint = (ready[OURS]["facts"][key] for key in ("engine", "fingerprint"))
    packages = [package for message in ready.values() for package in message["packages"]]
    record = Record(
        "peer-calls",
        rows=rows,
        settings={
            "peers": {peer: dict(ready[peer]["facts"]) for peer in chosen if peer in ready},
            "threads": counts,
            "rounds": rounds,
            "file_bytes": size,
        },
        model={"name": gguf.name, "fingerprint": fingerprint},
        engine=engine,
        **here(list(dict.fromkeys([*PACKAGES, *packages]))),
    )
    record = replace(record, summary=summary(rows))
    return Report(record.as_dict(), tables=[*tables(rows, size)])


def thread_counts(cores: int) -> list[int]:
    """Numbers of threads to compare: powers of two from 2 on, and all cores.

    >>> thread_counts(12)
    [2, 4, 8, 12]
    """
    counts = {cores}
    power = 2
    while power < cores:
        counts.add(power)
        power *= 2
    return sorted(counts)


def _chosen(peers: Sequence[str], progress: Progress) -> list[str]:
    """The peers to run, all installed. Raises InvalidRequest and MissingExtra."""
    for peer in peers:
        if peer not in PEERS:
            raise InvalidRequest(f"--calls compares with {' and '.join(PEERS)}, not with {peer}")
    installed = []
    for peer in peers or PEERS:
        try:
            check_names([peer])
            installed.append(peer)
        except MissingExtra as error:
            if peers:
                raise
            progress.say(f"{peer} is skipped: {error}")
    if not installed:
        raise MissingExtra(f"no peer is installed; install {' or '.join(PEERS)} with pip")
    return installed


def _start(
    peers: Sequence[str],
    setup: Mapping[str, Any],
    cache: Path,
    stack: ExitStack,
    progress: Progress,
) -> tuple[dict[str, Worker], list[Row]]:
    """Start every runtime twice, and keep the second; rows of how long that took.

    The first time the file is not in the page cache, and paceline's own cache is empty. A peer that
    cannot run the model is left out, with a line.
    """
    env = {**os.environ, CACHE_VARIABLE: str(cache)}
    workers: dict[str, Worker] = {}
    rows = []
    for name in (OURS, *peers):
        task = {**setup, "runtime": name}
        drop_page_cache(Path(setup["gguf"]))
        try:
            with progress.task(f"starting {name}, {setup['threads']} threads"):
                with Worker(task, env) as first:
                    cold = first.ready_seconds
                worker = stack.enter_context(Worker(task, env))
        except PacelineError as error:
            if name == OURS:
                raise
            progress.say(f"{name} is skipped: {error}")
            continue
        workers[name] = worker
        measures = {"cold_seconds": [cold], "warm_seconds": [worker.ready_seconds]}
        rows.append(_row(_START, name, setup["threads"], measures))
    return workers, rows


def _measure(
    workers: Mapping[str, Worker], threads: int, rounds: int, progress: Progress
) -> list[Row]:
    """Rows of all calls; a runtime without a case has no row in it."""
    rows = []
    cases = {
        **{f"{count} row{'s' * (count > 1)}": {"rows": count, "calls": _CALLS} for count in ROWS},
        f"prompt of {PROMPT}": {"prompt": PROMPT, "calls": 1},
    }
    label = f"measuring calls, {threads} threads"
    with progress.task(label, len(cases), unit="cases") as update:
        for number, (case, task) in enumerate(cases.items(), start=1):
            calls = {name: partial(worker.ask, task) for name, worker in workers.items()}
            times = interleaved(calls, rounds, number)
            ours = [seconds for seconds in times[OURS] if seconds is not None]
            for name, taken in times.items():
                seconds = [duration for duration in taken if duration is not None]
                if len(seconds) == rounds:
                    ratios = [
                        our_time / peer_time
                        for our_time, peer_time in zip(ours, seconds, strict=True)
                    ]
                    measures: dict[str, Sequence[float]] = {"seconds": seconds, "ratio": ratios}
                    if "prompt" in task:
                        rates = [task["prompt"] / duration for duration in seconds]
                        measures["prefill_tokens_per_second"] = rates
                    at = {key: count for key, count in task.items() if key == "rows"}
                    rows.append(_row(case, name, threads, measures, at))
            update(number)
    return rows


def _row(
    case: str,
    name: str,
    threads: int,
    measures: Mapping[str, Sequence[float]],
    at: Mapping[str, int] | None = None,
) -> Row:
    return Row(
        f"{case}, {threads} threads", case, name, measures, {**(at or {}), "threads": threads}
    )


def _add_peaks(rows: list[Row], workers: Mapping[str, Worker]) -> None:
    """Add the peak memory of the running workers to their rows of the start."""
    for place, row in enumerate(rows):
        worker = workers.get(row.contender)
        if row.kind == _START and worker and "peak_anonymous_bytes" not in row.measures:
            peak = {"peak_anonymous_bytes": [float(worker.peak_bytes)]}
            rows[place] = replace(row, measures={**row.measures, **peak})


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians of the measures, by case and runtime."""
    by_case: dict[str, Any] = {}
    for row in rows:
        medians = {name: median(values) for name, values in row.measures.items()}
        by_case.setdefault(row.case, {})[row.contender] = medians
    return by_case


def tables(rows: Sequence[Row], file_bytes: int) -> list[Table]:
    """The same to print: milliseconds and ratios of calls, then start and memory."""
    names = list(dict.fromkeys(row.contender for row in rows))
    medians = summary(rows)
    calls, starts = [], []
    for case, by_runtime in medians.items():
        if case.startswith(_START):
            starts += [
                _start_line(case, name, figures, file_bytes) for name, figures in by_runtime.items()
            ]
            continue
        times = [by_runtime.get(name, {}).get("seconds") for name in names]
        line = [case, *("-" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in times)]
        ratios = [by_runtime.get(name, {}).get("ratio") for name in names if name != OURS]
        calls.append([*line, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    over = [f"{OURS} / {name}" for name in names if name != OURS]
    return [
        (
            f"milliseconds, medians; ratios of times within a round; {file_bytes / 1e9:.2f} GB",
            ["call", *names, *over],
            calls,
        ),
        (
            "start to the first token, and peak anonymous memory",
            ["threads", "runtime", "cold, s", "warm, s", "GB", "/ file"],
            starts,
        ),
    ]


def _start_line(case: str, name: str, medians: Mapping[str, float], file_bytes: int) -> list[str]:
    peak = medians.get("peak_anonymous_bytes", 0)
    return [
        case.removeprefix(f"{_START}, "),
        name,
        f"{medians['cold_seconds']:.1f}",
        f"{medians['warm_seconds']:.1f}",
        f"{peak / 1e9:.2f}" if peak else "-",
        f"{peak / file_bytes:.2f}" if peak else "-",
    ]
