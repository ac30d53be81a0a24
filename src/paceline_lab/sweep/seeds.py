"""`bench run --suite seeds`: the two tables of the original experiments, measured locally.

Five short answers to code prompts, and 80 tokens after 100, 200, 372 and 800 of dense code, by
n-grams in blocks of four rows: the last token and three drafts, the experiments' `T=4`. Their rows
are listed with the local ones. Their prompts differed, so compare the columns, not the texts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from paceline.decoding.costs import CostTable
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.storage.report import Report, Table
from paceline.verify.suite import load_suite
from paceline_lab.bench.ab_test import (
    PLAIN,
    SINGLE_ROW,
    Case,
    contender_options,
    has_single_rows,
    max_context,
    options_facts,
)
from paceline_lab.bench.record import Record, Row
from paceline_lab.bench.summary import all_same_tokens
from paceline_lab.sweep.cases import LENGTHS, dense_text, length_cases, measured

NAME = Path("seeds")
"""The suite's name, in place of a file."""

_ROWS = 4
_CODE_TOKENS, _LENGTH_TOKENS = 20, 80
"""Tokens of an answer: the experiment's five had 95 together, those after dense code 80 each."""


class Line(NamedTuple):
    """A line of a table; empty values were not published."""

    name: str
    tokens: int | None
    plain_rate: float
    """Decode throughput without drafts, tokens/s."""
    rate: float | None = None
    counts: Sequence[float] = ()
    """Numbers of forward passes, drafted tokens, accepted tokens and fallbacks."""
    plain_ms: float | None = None
    """Milliseconds of a forward pass of one row."""
    ms: float | None = None
    """Milliseconds of a forward pass that verifies drafts."""

    def cells(self) -> list[str]:
        """Return the texts of the columns of `_HEAD`."""
        p = "-"
        if self.plain_ms is not None and self.ms is not None:
            pays = CostTable({1: self.plain_ms, _ROWS: self.ms}).break_even(_ROWS)
            p = "never" if pays is None else f"{pays:.2f}"
        tokens = "-" if self.tokens is None else str(self.tokens)
        rates = [f"{self.plain_rate:.1f}", "-", "-"]
        if self.rate is not None:
            rates[1:] = f"{self.rate:.1f}", f"{self.rate / self.plain_rate:.2f}"
        counts = [f"{count:.0f}" for count in self.counts] or ["-"] * 4
        ms = "-" if self.ms is None else f"{self.ms:.1f}"
        return [self.name, tokens, *rates, *counts, ms, p]


_HEAD = (
    *("prompt", "tokens", "plain tok/s", "tok/s", "/ plain", "calls", "drafted", "accepted"),
    *("fallbacks", "ms a call", "break-even p"),
)

_CODE_SEEDS = (
    # Experiment 26: exact greedy 95 tokens in 5.624088 s, speculative 93 in 4.290248 s.
    Line("Phi-4-mini (seed)", 93, 95 / 5.624088, 93 / 4.290248),
    # Experiment 34, the prompt of token ids 2,42: 14.473 s for 29 passes; 112 ms for one row.
    Line("ZAYA1-8B (seed)", 39, 8.62, 2.69, (29, 87, 10, 28), 112, 14473 / 29),
    Line("Hy-MT 1.5B (seed)", None, 34),
)
_LENGTH_SEEDS = tuple(
    # Experiment 26, prompt-length sweep; its rates without drafts are 17.8 throughout.
    Line(f"Phi-4-mini, {length} (seed)", 80, 17.8, rate)
    for length, rate in zip(LENGTHS, (21.1, 22.1, 26.7, 28.9), strict=True)
)

DEPTHS: Table = (
    "the seed by depth: Qwen3.5-27B in 4 bits on an M4 Max, MLX, DFlash in blocks of four",
    ["depth", "plain tok/s", "tok/s", "/ plain"],
    [
        [str(depth), f"{plain:.1f}", f"{rate:.1f}", f"{rate / plain:.2f}"]
        for depth, plain, rate in (
            (0, 26.3, 32.4),
            (512, 26.6, 47.5),
            (2048, 17.6, 38.5),
            (8192, 18.1, 25.0),
            (16384, 15.9, 31.1),
        )
    ],
)
"""The context depths of the DFlash-on-MLX experiment, to print below a sweep by depth."""


def seeds_report(
    load: Callable[[int], Model],
    *,
    drafters: Sequence[str],
    rounds: int,
    output: Path | None = None,
    progress: Progress,
) -> Report:
    """Return a record of the two tables for n-grams, and for `drafters` by the policy `auto`.

    `load` returns the model for a minimum number of rows. Plain decoding is the faster one, if the
    engine pads and also has passes of one row.
    """
    options = contender_options(["ngram"], [f"fixed:{_ROWS}"], [])
    if drafters:
        options |= contender_options(drafters, [], [])
    content, digest = dense_text()
    model = load(2)
    model.measured_costs()
    single = load(1) if has_single_rows(model, default=False) else None
    prompts = [prompt for prompt in load_suite().prompts if prompt.kind.startswith("code")]
    answer: Options = {"max_tokens": _CODE_TOKENS, "ignore_eos": True}
    code = [Case(prompt.id, "code prompts", prompt.messages, answer) for prompt in prompts[-5:]]
    room = max_context(model)
    needed = _CODE_TOKENS + max(len(model.tokens(case.prompt)) for case in code)
    if needed > room:
        raise InvalidRequest(
            f"the context of {model.files.name} has {room} tokens, the suite seeds needs {needed}; "
            f"use {'more slots' if model.files.engine == 'coreml' else 'more --cache-tokens'}, or "
            "a model with a longer context"
        )
    fitting = [n for n in LENGTHS if n + _LENGTH_TOKENS <= room]
    cases = [*code, *(length_cases(model, content, fitting, _LENGTH_TOKENS) if fitting else [])]
    settings = {"suite": str(NAME), "contenders": options_facts(options), "rounds": rounds}
    head = Record("run", [], settings, suite_sha256=digest)
    record = measured(
        head,
        model,
        options,
        cases,
        single=single,
        rounds=rounds,
        output=output,
        progress=progress,
    )
    long = [f"{n} tokens do not fit the context" for n in LENGTHS if n not in fitting]
    same, tables = all_same_tokens(record.rows), [*_tables(record.rows)]
    return Report(record.as_dict(), same, "\n".join(long), tables)


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    plain: dict[str, Row] = {}
    for row in rows:
        if row.contender in (PLAIN, SINGLE_ROW):
            plain[row.case] = min(
                plain.get(row.case, row), row, key=lambda one: _seconds([one], "decode_seconds")
            )
    others = [row.contender for row in rows if row.contender not in (PLAIN, SINGLE_ROW)]
    for name in dict.fromkeys(others):
        for kind, seeds in (("code prompts", _CODE_SEEDS), ("code", _LENGTH_SEEDS)):
            chosen = [row for row in rows if (row.contender, row.kind) == (name, kind)]
            lines = [_line(row.case, [row], plain) for row in chosen]
            if kind == "code prompts":
                lines.append(_line("all five", chosen, plain))
            title = "after dense code" if kind == "code" else kind
            yield f"{title}, by {name}", _HEAD, [one.cells() for one in (*lines, *seeds)]


def _line(name: str, rows: Sequence[Row], plain: Mapping[str, Row]) -> Line:
    """Return the sums over cases of a round's means; milliseconds are of medians."""
    base = [plain[row.case] for row in rows]
    tokens = sum(row.facts["tokens"] for row in rows)
    return Line(
        name,
        tokens,
        (tokens - len(rows)) / _seconds(base, "decode_seconds"),
        (tokens - len(rows)) / _seconds(rows, "decode_seconds"),
        [_mean(rows, count) for count in ("steps", "drafted", "accepted", "fallbacks")],
        1e3 * _seconds(base, "verify_seconds") / _mean(base, "steps"),
        1e3 * _seconds(rows, "verify_seconds") / _mean(rows, "steps"),
    )


def _seconds(rows: Sequence[Row], measure: str) -> float:
    return sum(median(row.measures[measure]) for row in rows)


def _mean(rows: Sequence[Row], count: str) -> float:
    """Return a count of a round, summed over cases."""
    return sum(float(str(row.counts[count])) / len(row.measures["ratio"]) for row in rows)
