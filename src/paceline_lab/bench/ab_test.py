"""Interleaved A/B test: all contenders answer the same cases, and each pair gives a row.

In every round all contenders answer a case, with fresh caches and drafters, and a ratio is taken
within the round. Every answer is compared with plain decoding's, token by token. Prefill and decode
are measured separately.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

from paceline.decoding.types import Counters
from paceline.drafters import DrafterSpec
from paceline.errors import InvalidRequest
from paceline.options import GREEDY, Options
from paceline.runtime.model import Model
from paceline.runtime.prompt import Prompt
from paceline.runtime.request import check
from paceline.runtime.result import Result
from paceline_lab.bench.record import Row, here

_T = TypeVar("_T")

PLAIN = "plain"
SINGLE_ROW = "plain, 1 row"


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and its generation options."""

    id: str
    kind: str
    prompt: Prompt
    options: Options = field(default_factory=Options)
    """Options for all contenders; a temperature requires a seed."""
    at: Mapping[str, float | str] = field(default_factory=dict)
    """Parameters, as in `Row`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts, as in `Row`."""
    keep_prompt: bool = True
    """True: the record has the prompt's tokens, so the case can be simulated. False for third-party
    data sets, which a record would publish."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A model (with its engine's settings) and its decoding options."""

    name: str
    model: Model
    options: Options

    @property
    def block(self) -> dict[str, int]:
        """`block`: the maximum rows of a block, if the options limit them."""
        rows = self.options.get("max_block")
        return {} if rows is None else {"block": rows}

    @property
    def curve(self) -> str:
        """The name of the curve that joins the contenders that differ in the block alone."""
        return f"{drafter_name(self.options['drafter'])}, {self.options.get('policy', 'auto')}"

    def answer(self, case: Case) -> Result:
        """Answer without state from earlier requests; greedy unless the case has other options."""
        options: Options = {**GREEDY, **case.options, **self.options}
        return self.model.without_history().generate(case.prompt, **options)


def drafter_name(spec: str) -> str:
    """Return a drafter's spec with paths cut to their last part: a record has no folders."""
    return DrafterSpec.parse(spec).without_folders


def measure(
    case: Case, contenders: Sequence[Contender], *, rounds: int, start: int = 0
) -> list[Row]:
    """Answer a case with all contenders, interleaved; return one row per contender.

    The first contender is plain decoding, the baseline of `ratio`; one called `SINGLE_ROW` is the
    baseline of `ratio_single_row`. The first row's facts have the tokens of answer and prompt.
    """
    calls = {contender.name: partial(contender.answer, case) for contender in contenders}
    answers = interleaved(calls, rounds, start)
    first, *others = (
        _row(case, contender, answers, contenders[0].name) for contender in contenders
    )
    # With its tokens, a case can be simulated.
    tokens = {"token_ids": answers[first.contender][0].token_ids}
    if case.keep_prompt:
        tokens = {"prompt_token_ids": contenders[0].model.tokens(case.prompt), **tokens}
    return [replace(first, facts={**first.facts, **tokens}), *others]


def interleaved(
    calls: Mapping[str, Callable[[], _T]], rounds: int, start: int = 0
) -> dict[str, list[_T]]:
    """Run every call once per round, in rotating order: other load affects all calls alike.

    `start` is the index of the call that begins the first round; pass a different number for every
    case. Returns name -> results, one per round, in the order of `calls`.
    """
    results: dict[str, list[_T]] = {name: [] for name in calls}
    names = [*calls]
    for turn in range(start, start + rounds):
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            results[name].append(calls[name]())
    return results


def about(model: Model) -> dict[str, Any]:
    """Return a record's fields that describe a model and this process."""
    return {
        **here(),
        "model": {"name": model.files.name, "fingerprint": model.files.fingerprint},
        "engine": model.engine.describe(),
    }


def has_single_rows(model: Model, *, default: bool) -> bool:
    """Return True if the engine has forward passes of one row; `default` if it does not say."""
    fault: str | None = getattr(model.engine, "single_row_fault", None)
    return default if fault is None else not fault


def max_context(model: Model) -> int:
    """Return the maximum tokens of prompt and answer together."""
    return model.scheduler.admission.max_length


def contender_options(
    drafters: Sequence[str], policies: Sequence[str], blocks: Sequence[int]
) -> dict[str, Options]:
    """Return contender -> options: plain decoding, then all drafters with all policies and blocks.

    Raises InvalidRequest if a drafter, a policy or a block is invalid.
    """
    contenders: dict[str, Options] = {PLAIN: {"drafter": "none"}}
    for drafter in drafters or ["auto"]:
        for policy in policies or (["fixed"] if blocks else ["auto"]):
            rule, colon, rows = policy.partition(":")
            if colon and not rows.isdecimal():
                raise InvalidRequest(
                    f"policy {policy!r} has no block; expected a number of rows, as in {rule}:8"
                )
            chosen: list[int | None] = [int(rows)] if colon else [*blocks] or [None]
            for block in chosen:
                name = drafter_name(drafter)
                if rule != "auto" or block:
                    name += f", {rule}{f' {block}' if block else ''}"
                contenders[name] = {"drafter": drafter, "policy": rule, "max_block": block}
                check(contenders[name])
    return contenders


def options_facts(options: Mapping[str, Options]) -> dict[str, Any]:
    """Return contenders' options by name, for a record's settings; drafters have no folders."""
    return {
        name: {**settings, "drafter": drafter_name(settings["drafter"])}
        for name, settings in options.items()
    }


def measures_of(result: Result) -> dict[str, float]:
    """Return the measures of one answer, by their names in `Row.measures`."""
    stats = result.stats
    computed = result.prompt_tokens - stats.cached_tokens
    return {
        "decode_tokens_per_second": stats.decode_tokens_per_second,
        "prefill_tokens_per_second": computed / stats.prefill_seconds,
        **{name: getattr(stats, name) for name in _STATS},
    }


_STATS = (
    *("tokens_per_step", "acceptance_rate", "first_token_seconds", "prefill_seconds"),
    *("decode_seconds", "draft_seconds", "verify_seconds", "sample_seconds"),
)


def _decode_rate(result: Result) -> float:
    """Return decode throughput, tokens/s; 1.0 for an answer of one token (no decode step)."""
    return result.stats.decode_tokens_per_second or 1.0


def _whole_rate(result: Result) -> float:
    """Return the throughput of prefill and decode, in answer tokens/s."""
    return result.completion_tokens / (result.stats.prefill_seconds + result.stats.decode_seconds)


def _row(
    case: Case, contender: Contender, answers: Mapping[str, Sequence[Result]], plain: str
) -> Row:
    results = answers[contender.name]

    def ratios(base: str, rate: Callable[[Result], float] = _decode_rate) -> list[float]:
        pairs = zip(results, answers[base], strict=True)
        return [rate(result) / rate(base_result) for result, base_result in pairs]

    by_round = [measures_of(result) for result in results]
    measures = {measure: [values[measure] for values in by_round] for measure in by_round[0]}
    measures["ratio"] = ratios(plain)
    if SINGLE_ROW in answers:
        measures["ratio_single_row"] = ratios(SINGLE_ROW)
    measures["ratio_with_prefill"] = ratios(plain, _whole_rate)
    expected = answers[plain][0].token_ids
    return Row(
        case=case.id,
        kind=case.kind,
        contender=contender.name,
        measures=measures,
        at={**case.at, **contender.block},
        counts=sums([result.stats for result in results]),
        facts={
            **case.facts,
            "tokens": results[0].completion_tokens,
            "prompt_tokens": results[0].prompt_tokens,
            "same_tokens": all(result.token_ids == expected for result in results),
            **({"way": contender.curve} if contender.block else {}),
        },
    )


def sums(counters: Sequence[Counters]) -> dict[str, Any]:
    """Return `Row.counts` of several answers."""
    counts: dict[str, Any] = {
        name: sum(getattr(one, name) for one in counters)
        for name in ("steps", "drafted", "accepted", "fallbacks")
    }
    for name in ("drafted_by", "accepted_by"):
        by_drafter = Counter[str]()
        for one in counters:
            by_drafter.update(getattr(one, name))
        counts[name] = dict(by_drafter)
    for name in ("drafted_at", "accepted_at"):
        places = zip_longest(*(getattr(one, name) for one in counters), fillvalue=0)
        counts[name] = [*map(sum, places)]
    return counts
