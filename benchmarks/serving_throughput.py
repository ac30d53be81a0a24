"""Server throughput: 8 clients against 1.

    python benchmarks/serving_throughput.py --output benchmarks/results/serving-throughput.json

The same prompts, greedy, without a prefix cache, except for the variants called `known`, in which
all prompts are hits. In every round each variant answers all prompts, in rotating order, and ratios
are taken within the round. Clients are in this process, and call over HTTP. The model is
$PACELINE_MODEL, or the one that paceline has by default.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from clients.server import Server, served

import paceline
from paceline.cli.options import default_model
from paceline.verify.suite import SuitePrompt
from paceline_lab.bench.turns import chosen_prompts
from paceline_lab.client import PLAIN, Access, closed_loop, connect

MANY = 8
SLOTS = 16384
"""Tokens of the KV cache: all prompts and answers fit."""

COUNTED = ("engine_calls", "engine_rows", "engine_seconds", "steps", "step_tokens")


@dataclass(frozen=True)
class Answered:
    """A variant's answers to all prompts."""

    seconds: float
    tokens: int
    answers: Mapping[str, str]
    """Prompt -> text."""
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


Variant = Callable[[Sequence[SuitePrompt], int], Answered]
"""(prompts, max_tokens) -> answers."""


def ours(server: Server, drafter: str, clients: int, *, known: bool = False) -> Variant:
    """Clients of paceline's server; with `known`, prompts are prefix cache hits."""
    fields = {
        "cache_prompt": known,
        "speculation": {"drafter": drafter},
        "repetition_penalty": 1.0,  # not the model's default
    }

    def answer(prompts: Sequence[SuitePrompt], max_tokens: int) -> Answered:
        plain = connect(server.url, Access())[PLAIN]
        endpoint = replace(plain, max_tokens=max_tokens, fields=fields)
        before = {name: server.metric(f"paceline_{name}_total") for name in COUNTED}
        began = perf_counter()
        asked = [(prompt.id, prompt.messages) for prompt in prompts]
        samples = closed_loop(endpoint, asked, clients=clients, requests=len(asked))
        seconds = perf_counter() - began
        if faults := {sample.error for sample in samples if sample.error}:
            raise RuntimeError(f"the server failed: {faults}")
        return Answered(
            seconds,
            sum(sample.tokens for sample in samples),
            {sample.prompt: sample.text for sample in samples},
            {n: server.metric(f"paceline_{n}_total") - was for n, was in before.items()},
        )

    return answer


def main() -> None:
    """Measure, print, and write the result to --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="prompts; default: all")
    parser.add_argument("--suite", type=Path, help="file of prompts; default: our own")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    suite = chosen_prompts(options.suite, limit=options.limit)
    with served(["--parallel", str(MANY), "--cache-tokens", str(SLOTS)]) as server:
        variants: dict[str, Variant] = {}
        for clients in (1, MANY):
            for drafter in ("auto", "none"):
                variants[f"paceline {drafter}, {clients}"] = ours(server, drafter, clients)
            variants[f"paceline known, {clients}"] = ours(server, "auto", clients, known=True)
        variants["paceline known, 1"](suite.prompts, 1)  # fills the prefix cache
        for answer in variants.values():
            answer(suite.prompts[:2], 8)  # warm-up
        rounds = []
        for turn in range(options.rounds):
            rounds.append(_round(variants, turn, suite.prompts, options.max_tokens))
            print(json.dumps({name: round(each.rate, 1) for name, each in rounds[-1].items()}))
    result = {
        "command": "python benchmarks/serving_throughput.py",
        "engine": paceline.load(default_model(), parallel=MANY).engine.describe(),
        "suite_sha256": suite.sha256,
        "prompts": len(suite.prompts),
        "max_tokens": options.max_tokens,
        "rounds": options.rounds,
        **_summary(rounds),
    }
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def _round(
    variants: Mapping[str, Variant], turn: int, prompts: Sequence[SuitePrompt], most: int
) -> dict[str, Answered]:
    names = list(variants)
    shift = turn * 3 % len(names)
    return {name: variants[name](prompts, most) for name in names[shift:] + names[:shift]}


def _summary(rounds: Sequence[Mapping[str, Answered]]) -> dict[str, Any]:
    def ratio(mine: str, theirs: str) -> float:
        return round(median(each[mine].rate / each[theirs].rate for each in rounds), 3)

    def same(mine: str, theirs: str) -> int:
        one, other = rounds[-1][mine].answers, rounds[-1][theirs].answers
        return sum(text.strip() == other[name].strip() for name, text in one.items())

    names = list(rounds[0])
    many = [f"{mode}, {MANY}" for mode in MODES]
    plain = "paceline none, 1"
    return {
        "many_over_one": {mode: ratio(f"{mode}, {MANY}", f"{mode}, 1") for mode in MODES},
        "paceline_auto_over": {mode: ratio(many[0], mode) for mode in many[1:]},
        "paceline_none_over": {mode: ratio(many[1], mode) for mode in many[2:]},
        f"same_texts_as_{plain}": {name: same(name, plain) for name in names if name != plain},
        "tokens_per_second": {
            name: {
                "median": round(median(each[name].rate for each in rounds), 1),
                "rounds": [round(each[name].rate, 1) for each in rounds],
            }
            for name in names
        },
        "tokens": {name: rounds[-1][name].tokens for name in names},
        "last_round": {
            name: {
                "seconds": round(rounds[-1][name].seconds, 3),
                **{key: round(value, 3) for key, value in rounds[-1][name].more.items()},
            }
            for name in names
        },
    }


MODES = ("paceline auto", "paceline none", "paceline known")


if __name__ == "__main__":
    main()
