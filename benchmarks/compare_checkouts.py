"""Compare two checkouts of paceline in turns: speed, first token, host time, memory and tokens.

    git worktree add ../before COMMIT
    python benchmarks/compare_checkouts.py ../before . --output benchmarks/results/checkouts.json

Each checkout has a process of its own with the model loaded, and a server. A prompt, or a list of
those asked together, goes to both, one right after the other, in alternating order; a ratio is of
such a pair. A checkout compared with itself shows how far the machine alone moves a ratio. Exits
with 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

WORKER = "--worker"
if sys.argv[1:2] != [WORKER]:  # a checkout may have these modules elsewhere
    from clients.server import Server, served

    from paceline.cli.options import default_model
    from paceline.verify.suite import SuitePrompt
    from paceline_lab.bench.turns import chosen_prompts
    from paceline_lab.client import PLAIN, Access, closed_loop, connect

CLIENTS = 8

ONE = ("plain", "auto", "stream")
RATES = (*ONE, "list", "clients")
"""Ways of asking, measured in tokens per second; a ratio above 1 is faster."""

COSTS = ("first_token_ms", "host_us_per_token", "memory_mb", "server_memory_mb")
"""Measures whose ratio is better below 1."""


def main() -> int:
    """Measure, print, and write the result to --output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="folder of a checkout")
    parser.add_argument("after", type=Path, help="folder of another one")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--suite", type=Path, help="file of prompts; default: our own")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    suite = chosen_prompts(options.suite, limit=options.prompts)
    rounds = []
    with ExitStack() as stack:
        checkouts = [
            stack.enter_context(opened(folder.resolve(), options.model, options.max_tokens))
            for folder in (options.before, options.after)
        ]
        run_round(checkouts, suite.prompts[:2], "warm-up")
        for turn in range(options.rounds):
            rounds.append(run_round(checkouts, suite.prompts, f"round {turn}"))
            print(json.dumps(_ratios(rounds[-1:])), flush=True)
        differing = sum(before["tokens"] != after["tokens"] for before, after in rounds)
    record = {
        "command": f"python benchmarks/compare_checkouts.py {' '.join(sys.argv[1:])}",
        "commits": [_commit(folder) for folder in (options.before, options.after)],
        "model": options.model,
        "suite_sha256": suite.sha256,
        "prompts": len(suite.prompts),
        "max_tokens": options.max_tokens,
        "rounds_with_differing_tokens": differing,
        "after_over_before": _ratios(rounds),
        "medians": [
            {
                name: round(median(value for pair in rounds for value in pair[at][name]), 2)
                for name in RATES + COSTS
            }
            for at in (0, 1)
        ],
    }
    print(json.dumps(record, indent=1))
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return int(differing > 0)


def run_round(
    checkouts: Sequence[Checkout], prompts: Sequence[SuitePrompt], name: str
) -> list[dict[str, list[Any]]]:
    """Return each checkout's measures: name -> a value for each pair.

    Every prompt begins with its round and way, so that no earlier one is in a prefix cache.
    """
    measures: list[dict[str, list[Any]]] = [defaultdict(list) for _ in checkouts]
    for way in RATES:
        first = {"role": "system", "content": f"{name}, {way}"}
        asked = [replace(prompt, messages=[first, *prompt.messages]) for prompt in prompts]
        for number, group in enumerate([[one] for one in asked] if way in ONE else [asked]):
            for at in (0, 1) if number % 2 == 0 else (1, 0):
                for measure, value in checkouts[at].measure(way, group).items():
                    measures[at][measure].append(value)
    return measures


class Checkout:
    """A process with a checkout's model loaded, and its server."""

    def __init__(self, worker: subprocess.Popen[str], server: Server, max_tokens: int) -> None:
        self._worker, self._server, self._max_tokens = worker, server, max_tokens

    def measure(self, way: str, prompts: Sequence[SuitePrompt]) -> dict[str, Any]:
        """Return the measures of one way of asking, and with `auto` the token ids."""
        if way == "clients":
            return self._clients(prompts)
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        messages = [list(map(dict, prompt.messages)) for prompt in prompts]
        self._worker.stdin.write(json.dumps([way, messages]) + "\n")
        self._worker.stdin.flush()
        measures: dict[str, Any] = json.loads(self._worker.stdout.readline())
        return measures

    def _clients(self, prompts: Sequence[SuitePrompt]) -> dict[str, Any]:
        plain = connect(self._server.url, Access())[PLAIN]
        endpoint = replace(plain, max_tokens=self._max_tokens)
        asked = [(prompt.id, prompt.messages) for prompt in prompts]
        began = perf_counter()
        samples = closed_loop(endpoint, asked, clients=CLIENTS, requests=len(asked))
        seconds = perf_counter() - began
        if faults := {sample.error for sample in samples if sample.error}:
            raise SystemExit(f"the server failed: {faults}")
        return {
            "clients": sum(sample.tokens for sample in samples) / seconds,
            "server_memory_mb": _resident_megabytes(self._server.process),
        }


@contextmanager
def opened(folder: Path, model: str, max_tokens: int) -> Iterator[Checkout]:
    """Start a checkout's processes; end them afterwards."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    command = [sys.executable, __file__, WORKER, model, str(max_tokens)]
    worker = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with worker, served(["--model", model], environment=environment) as server:
        yield Checkout(worker, server, max_tokens)
        assert worker.stdin is not None
        worker.stdin.close()


def work(model_name: str, max_tokens: int) -> None:
    """Answer each line on standard input, a way of asking and prompts, by a line of measures."""
    import paceline

    greedy: Any = {"max_tokens": max_tokens, "temperature": 0.0, "repetition_penalty": 1.0}
    with paceline.load(model_name) as model:

        def stream(prompt: Any) -> paceline.Result:
            with model.stream(prompt, **greedy) as stream:
                for _ in stream:
                    pass
                return stream.result

        def answer(way: str, prompts: Any) -> list[paceline.Result]:
            if way == "list":
                results: list[paceline.Result] = model.generate(prompts, **greedy)
                return results
            if way == "stream":
                return [stream(prompt) for prompt in prompts]
            drafter = "none" if way == "plain" else "auto"
            return [model.generate(prompt, drafter=drafter, **greedy) for prompt in prompts]

        for line in sys.stdin:
            way, prompts = json.loads(line)
            began = perf_counter()
            results = answer(way, prompts)
            seconds = perf_counter() - began
            count = sum(len(result.token_ids) for result in results)
            measures: dict[str, Any] = {way: count / seconds}
            if way == "plain":
                stats = [result.stats for result in results]
                host, decoded = (sum(getattr(one, name) for one in stats) for name in _HOST)
                measures["host_us_per_token"] = 1e6 * host / decoded
                measures["first_token_ms"] = 1e3 * median(one.first_token_seconds for one in stats)
            if way == "auto":
                measures["tokens"] = [result.token_ids for result in results]
                measures["memory_mb"] = _resident_megabytes(os.getpid())
            print(json.dumps(measures), flush=True)


_HOST = ("host_seconds", "decoded")


def _ratios(rounds: Sequence[Sequence[Mapping[str, list[Any]]]]) -> dict[str, list[float]]:
    """Return, by measure, the median, least and largest of the pairs' ratios."""
    ratios = {}
    for name in RATES + COSTS:
        pairs = [pair for both in rounds for pair in zip(*(one[name] for one in both), strict=True)]
        values = sorted(after / before for before, after in pairs)
        ratios[name] = [round(value, 3) for value in (median(values), values[0], values[-1])]
    return ratios


def _resident_megabytes(process: int) -> float:
    command = ["ps", "-o", "rss=", "-p", str(process)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
