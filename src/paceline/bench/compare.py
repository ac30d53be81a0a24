"""Contenders against plain decoding on a suite: the same prompts, in turns, as ratios.

The machine is shared with whatever else it does, so a contender is never compared with a number
from another minute: in every round each prompt is answered by all, in rotating order, and a ratio
is taken within the round. Every answer is also compared with plain decoding's, token for token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean, median
from typing import Any

from paceline.bench.suite import Suite, SuitePrompt
from paceline.options import Options
from paceline.results import Result
from paceline.runtime import Model

PLAIN = "plain"
SINGLE_ROW = "plain, 1 row"


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to decode: a model (its engine's settings count too) and options."""

    name: str
    model: Model
    options: Options


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt with one contender: medians over the rounds."""

    prompt: str
    kind: str
    contender: str
    tokens: int
    tokens_per_second: float
    tokens_per_step: float
    acceptance_rate: float
    host_share: float
    """Of decode time, outside the engine's calls."""
    first_token_seconds: float
    ratio: float
    """Speed over plain's, the median of the rounds' ratios."""
    ratio_single_row: float | None
    """Speed over single-row plain decoding's, where that ran."""
    same_tokens: bool
    """Whether every round's tokens equal plain's."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out."""

    rows: Sequence[Row]

    def means(self, kind: str | None = None) -> Mapping[str, float]:
        """Contender -> geometric mean of its ratios, over all prompts or those of a kind."""
        return self._means(lambda row: row.ratio, kind)

    def means_single_row(self, kind: str | None = None) -> Mapping[str, float]:
        """The same against single-row plain decoding; empty when that did not run."""
        return self._means(lambda row: row.ratio_single_row, kind)

    def worst(self, contender: str) -> Row:
        """The prompt on which a contender did worst."""
        return min((r for r in self.rows if r.contender == contender), key=lambda r: r.ratio)

    @property
    def kinds(self) -> list[str]:
        """Kinds, in the suite's order."""
        return list(dict.fromkeys(row.kind for row in self.rows))

    @property
    def contenders(self) -> list[str]:
        """Contenders, in the order given."""
        return list(dict.fromkeys(row.contender for row in self.rows))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "geometric_means": dict(self.means()),
            "geometric_means_single_row": dict(self.means_single_row()),
            "by_kind": {kind: dict(self.means(kind)) for kind in self.kinds},
            "worst": {name: self.worst(name).ratio for name in self.contenders},
            "rows": [asdict(row) for row in self.rows],
        }

    def _means(self, ratio: Callable[[Row], float | None], kind: str | None) -> Mapping[str, float]:
        found: dict[str, list[float]] = {}
        for row in self.rows:
            value = ratio(row)
            if value is not None and kind in (None, row.kind):
                found.setdefault(row.contender, []).append(value)
        return {name: geometric_mean(values) for name, values in found.items()}


def compare(
    suite: Suite,
    contenders: Sequence[Contender],
    *,
    rounds: int,
    max_tokens: int,
    watch: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Run the suite.

    Args:
        suite: the prompts.
        contenders: the first one is plain decoding, what the others are compared with. One called
            `SINGLE_ROW` is what the second ratio is taken against.
        rounds: how often each answers each prompt.
        max_tokens: of each answer, which may end sooner.
        watch: called with a line after each prompt.

    """
    rows: list[Row] = []
    for number, prompt in enumerate(suite.prompts, start=1):
        answers: dict[str, list[Result]] = {each.name: [] for each in contenders}
        for turn in range(rounds):
            shift = (turn + number) % len(contenders)
            for each in [*contenders[shift:], *contenders[:shift]]:
                answers[each.name].append(_answer(each, prompt, max_tokens))
        fresh = [_row(prompt, name, answers, contenders[0].name) for name in answers]
        rows += fresh
        ratios = ", ".join(f"{row.contender} {row.ratio:.2f}" for row in fresh[1:])
        watch(f"{number}/{len(suite.prompts)} {prompt.id}: {ratios}")
    return Comparison(rows)


def _answer(contender: Contender, prompt: SuitePrompt, max_tokens: int) -> Result:
    options: Options = {**contender.options, "max_tokens": max_tokens}
    # As a first request has it.
    return contender.model.fresh().generate(prompt.messages, **options)


def _row(
    prompt: SuitePrompt, name: str, answers: Mapping[str, Sequence[Result]], plain: str
) -> Row:
    results = answers[name]

    def ratio(base: str) -> float:
        pairs = zip(results, answers[base], strict=True)
        return median(_rate(mine) / _rate(theirs) for mine, theirs in pairs)

    return Row(
        prompt=prompt.id,
        kind=prompt.kind,
        contender=name,
        tokens=results[0].completion_tokens,
        tokens_per_second=median(map(_rate, results)),
        tokens_per_step=median(r.stats.tokens_per_step for r in results),
        acceptance_rate=median(r.stats.acceptance_rate for r in results),
        host_share=median(
            r.stats.host_seconds * _rate(r) / max(r.stats.decoded, 1) for r in results
        ),
        first_token_seconds=median(r.stats.first_token_seconds for r in results),
        ratio=ratio(plain),
        ratio_single_row=ratio(SINGLE_ROW) if SINGLE_ROW in answers else None,
        same_tokens=all(r.token_ids == answers[plain][0].token_ids for r in results),
    )


def _rate(result: Result) -> float:
    """Tokens per second of decoding; 1.0 for an answer of one token, which has no decoding."""
    return result.stats.decode_tokens_per_second or 1.0
