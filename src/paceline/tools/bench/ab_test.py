"""Contenders against plain decoding: the same cases, in turns, as rows of a record.

In every round a case is answered by all variants (`turns.py`), each as a first request has it,
and a ratio is taken within the round. Every answer is also compared with plain decoding's, token
for token. Prefill and decode are measured apart.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from paceline.models import Progress
from paceline.runtime.model import Model, Prompt
from paceline.runtime.options import GREEDY, Options
from paceline.runtime.result import Result
from paceline.tools.bench.journal import Journal
from paceline.tools.bench.record import Row

_T = TypeVar("_T")

PLAIN = "plain"
SINGLE_ROW = "plain, 1 row"


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked."""

    id: str
    kind: str
    prompt: Prompt
    options: Options = field(default_factory=Options)
    """How it is answered, whoever answers; with a temperature there is a seed."""
    at: Mapping[str, float | str] = field(default_factory=dict)
    """As in `Row`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """As in `Row`."""
    keep_prompt: bool = True
    """Whether the record has the prompt's tokens, so that the case can be simulated. Not those of
    other people's data sets, which a record would publish."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to decode: a model (its engine's settings count too) and options."""

    name: str
    model: Model
    options: Options

    @property
    def block(self) -> dict[str, int]:
        """`block`: the most rows of a block, where the options say so."""
        rows = self.options.get("max_block")
        return {} if rows is None else {"block": rows}

    @property
    def way(self) -> str:
        """What it has in common with those that differ in the block alone."""
        return f"{called(self.options['drafter'])}, {self.options.get('policy', 'auto')}"

    def answer(self, case: Case) -> Result:
        """The answer, as a first request has it: nothing is known of those before.

        Greedy, unless the case says otherwise.
        """
        options: Options = {**GREEDY, **case.options, **self.options}
        return self.model.fresh().generate(case.prompt, **options)


def called(drafter: str) -> str:
    """A drafter's spec without the folders in it: those are no part of a result."""
    parts = (part.partition(":") for part in drafter.split("+"))
    return "+".join(f"{kind}{colon}{Path(rest).name}" for kind, colon, rest in parts)


def warm_up(variants: Sequence[Variant], case: Case) -> None:
    """Let each answer once: whatever is done at the first request has then been done."""
    for each in variants:
        each.answer(case)


def measure_all(
    cases: Sequence[Case],
    variants: Sequence[Variant],
    *,
    rounds: int,
    kept: Journal,
    progress: Progress,
) -> list[Row]:
    """The rows of all cases; what an interrupted run has kept is not measured again."""
    rows: list[Row] = []
    for number, case in enumerate(cases, start=1):
        known = kept.get(case.id)
        fresh = known or kept.add(case.id, measure(case, variants, rounds=rounds, start=number))
        rows += fresh
        progress.say(progress_line(fresh, f"{number}/{len(cases)}", before=known is not None))
    return rows


def progress_line(rows: Sequence[Row], place: str, *, before: bool) -> str:
    """A case's ratios in one line; `place` is how far the run is."""
    ratios = (f"{row.contender} {median(row.measures['ratio']):.2f}" for row in rows[1:])
    note = " (measured before)" if before else ""
    return f"{place} {rows[0].case}: {', '.join(ratios)}{note}"


def measure(case: Case, variants: Sequence[Variant], *, rounds: int, start: int = 0) -> list[Row]:
    """Let all variants answer a case, in turns.

    Args:
        case: what is asked.
        variants: the first one is plain decoding, what the others are compared with. One called
            `SINGLE_ROW` is what a second ratio is taken against.
        rounds: how often each answers.
        start: who begins; pass another number for each case.

    Returns:
        A row for each variant; the first one's facts have the answer's tokens, and the prompt's.
    """
    ways = {each.name: _answering(each, case) for each in variants}
    answers = interleaved(ways, rounds, start)
    first, *others = (_row(case, each, answers, variants[0].name) for each in variants)
    # With its tokens a case can be simulated.
    tokens = {"token_ids": answers[first.contender][0].token_ids}
    if case.keep_prompt:
        tokens = {"prompt_token_ids": variants[0].model.tokens(case.prompt), **tokens}
    return [replace(first, facts={**first.facts, **tokens}), *others]


def interleaved(
    calls: Mapping[str, Callable[[], _T]], rounds: int, start: int = 0
) -> dict[str, list[_T]]:
    """Run every call once a round, in an order that rotates, so that load on the machine hits all.

    Args:
        calls: what to run, by name.
        rounds: how often each runs.
        start: index of the call that begins round 0; the first call moves on by one a round.

    Returns:
        Name -> its results, one a round, in the order of `calls`.
    """
    found: dict[str, list[_T]] = {name: [] for name in calls}
    names = [*calls]
    for turn in range(start, start + rounds):
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            found[name].append(calls[name]())
    return found


def about(model: Model) -> dict[str, Any]:
    """What a record says of a model."""
    return {
        "model": {"name": model.files.name, "fingerprint": model.files.fingerprint},
        "engine": model.engine.describe(),
    }


def _answering(variant: Variant, case: Case) -> Callable[[], Result]:
    return lambda: variant.answer(case)


def _rate(result: Result) -> float:
    """Tokens per second of decoding; 1.0 for an answer of one token, which has no decoding."""
    return result.stats.decode_tokens_per_second or 1.0


def _whole_rate(result: Result) -> float:
    """Tokens per second from the prompt's first call to the last token."""
    return result.completion_tokens / (result.stats.prefill_seconds + result.stats.decode_seconds)


def _row(case: Case, variant: Variant, answers: Mapping[str, Sequence[Result]], plain: str) -> Row:
    results = answers[variant.name]

    def ratios(base: str, rate: Callable[[Result], float] = _rate) -> list[float]:
        pairs = zip(results, answers[base], strict=True)
        return [rate(mine) / rate(theirs) for mine, theirs in pairs]

    each = [measures_of(result) for result in results]
    measures = {measure: [found[measure] for found in each] for measure in each[0]}
    measures["ratio"] = ratios(plain)
    if SINGLE_ROW in answers:
        measures["ratio_single_row"] = ratios(SINGLE_ROW)
    measures["ratio_with_prefill"] = ratios(plain, _whole_rate)
    expected = answers[plain][0].token_ids
    return Row(
        case=case.id,
        kind=case.kind,
        contender=variant.name,
        measures=measures,
        at={**case.at, **variant.block},
        counts=_counts(results),
        facts={
            **case.facts,
            "tokens": results[0].completion_tokens,
            "prompt_tokens": results[0].prompt_tokens,
            "same_tokens": all(result.token_ids == expected for result in results),
            **({"way": variant.way} if variant.block else {}),
        },
    )


def measures_of(result: Result) -> dict[str, float]:
    """What a record keeps of one answer, by the names that `Row.measures` has."""
    stats = result.stats
    computed = result.prompt_tokens - stats.cached_tokens
    return {
        "decode_tokens_per_second": stats.decode_tokens_per_second,
        "prefill_tokens_per_second": computed / stats.prefill_seconds,
        "tokens_per_step": stats.tokens_per_step,
        "acceptance_rate": stats.acceptance_rate,
        "first_token_seconds": stats.first_token_seconds,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "draft_seconds": stats.draft_seconds,
        "verify_seconds": stats.verify_seconds,
        "sample_seconds": stats.sample_seconds,
    }


def _counts(results: Sequence[Result]) -> dict[str, Any]:
    """Sums over the rounds."""
    every = [result.stats for result in results]
    found: dict[str, Any] = {
        name: sum(getattr(stats, name) for stats in every)
        for name in ("steps", "drafted", "accepted")
    }
    for name in ("drafted_by", "accepted_by"):
        sums = Counter[str]()
        for stats in every:
            sums.update(getattr(stats, name))
        found[name] = dict(sums)
    for name in ("drafted_at", "accepted_at"):
        places = Counter[int]()
        for stats in every:
            places.update(dict(enumerate(getattr(stats, name))))
        found[name] = [places[place] for place in sorted(places)]
    return found
