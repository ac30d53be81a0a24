"""Aggregates of simulations: totals, rows of a record, and tables to print."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from statistics import geometric_mean
from typing import Any

from paceline.storage.report import Table
from paceline_lab.bench.ab_test import PLAIN, sums
from paceline_lab.bench.record import Row
from paceline_lab.simulate.replay import Simulation

POSITIONS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31)
"""Printed positions in a draft."""


class Total:
    """All texts with one drafter and policy."""

    def __init__(self, simulations: Iterable[Simulation]) -> None:
        self.simulations = [*simulations]
        self.counts = sums([simulation.counters for simulation in self.simulations])
        """Counts, as in `Row.counts`."""

    def sum(self, value_of: Callable[[Simulation], float]) -> float:
        return sum(map(value_of, self.simulations))

    @property
    def steps(self) -> int:
        return int(self.counts["steps"])

    @property
    def ideal(self) -> float:
        """The tokens per step: speed over plain decoding if all forward passes cost the same."""
        return self.sum(lambda simulation: simulation.decoded) / max(self.steps, 1)

    @property
    def expected(self) -> float:
        """The speed over plain decoding by the cost table, all texts together."""
        took = self.sum(lambda simulation: simulation.seconds)
        return self.sum(lambda simulation: simulation.plain_seconds) / took if took else 1.0

    def mean(self) -> float:
        """Return the geometric mean of the texts' expected speed-ups."""
        return geometric_mean([simulation.speed_up for simulation in self.simulations])

    @property
    def slower(self) -> int:
        """The number of texts that are slower than with plain decoding."""
        return sum(simulation.speed_up < 1 for simulation in self.simulations)

    def of_kind(self, kind: str) -> "Total":
        return Total(one for one in self.simulations if one.recording.kind == kind)

    def row(
        self, kind: str, contender: str, measures: Mapping[str, float], counts: Mapping[str, Any]
    ) -> Row:
        recordings = [simulation.recording for simulation in self.simulations]
        facts = {
            "tokens": sum(len(recording.answer) for recording in recordings),
            "prompt_tokens": sum(len(recording.prompt) for recording in recordings),
        }
        case = f"{len(recordings)} texts of {kind}"
        single = {name: [one] for name, one in measures.items()}
        return Row(case, kind, contender, single, counts=counts, facts=facts)


def rows_of(totals: Mapping[str, Total]) -> Iterator[Row]:
    """Yield the rows of plain decoding and of all contenders, per kind of text."""
    first = next(iter(totals.values()))
    for kind in kinds_of(first):
        texts = first.of_kind(kind)
        seconds = texts.sum(lambda simulation: simulation.plain_seconds)
        measures = {"ratio": 1.0, "tokens_per_step": 1.0, "decode_seconds": seconds}
        steps = int(texts.sum(lambda simulation: simulation.decoded))
        yield texts.row(kind, PLAIN, measures, {"steps": steps, "drafted": 0, "accepted": 0})
        for name, total in totals.items():
            of_kind = total.of_kind(kind)
            counts = of_kind.counts
            measures = {
                "ratio": of_kind.expected,
                "tokens_per_step": of_kind.ideal,
                "acceptance_rate": counts["accepted"] / max(counts["drafted"], 1),
                "decode_seconds": of_kind.sum(lambda simulation: simulation.seconds),
            }
            yield of_kind.row(kind, name, measures, counts)


def kinds_of(total: Total) -> list[str]:
    """Return the kinds of texts, in order of appearance."""
    return list(dict.fromkeys(simulation.recording.kind for simulation in total.simulations))


def tables(totals: Mapping[str, Total]) -> Iterator[Table]:
    yield _overall(totals)
    kinds = kinds_of(next(iter(totals.values())))
    if len(kinds) > 1:
        means = (
            (kind, [total.of_kind(kind).mean() for total in totals.values()]) for kind in kinds
        )
        lines = [[kind, *(f"{mean:.2f}" for mean in kind_means)] for kind, kind_means in means]
        yield "expected speed-up, geometric means by kind", ["kind", *totals], lines
    yield _by_position(totals)


def summary(total: Total) -> dict[str, Any]:
    places = zip_longest(total.counts["accepted_at"], total.counts["drafted_at"], fillvalue=0)
    return {
        "passes": total.steps,
        "tokens": int(total.sum(lambda simulation: simulation.decoded)),
        "ideal": total.ideal,
        "expected": total.expected,
        "expected_geometric_mean": total.mean(),
        "expected_worst": min(simulation.speed_up for simulation in total.simulations),
        "slower": total.slower,
        "accepted_by_place": [accepted / drafted for accepted, drafted in places],
    }


def _overall(totals: Mapping[str, Total]) -> Table:
    head = ["contender", "tokens", "steps", "drafted", "accepted", "ideal", "expected"]
    lines = []
    for name, total in totals.items():
        drafted, accepted = total.counts["drafted"], total.counts["accepted"]
        lines.append(
            [
                name,
                f"{total.sum(lambda simulation: simulation.decoded):.0f}",
                str(total.steps),
                str(drafted),
                f"{100 * accepted / max(drafted, 1):.0f} %",
                f"{total.ideal:.2f}",
                f"{total.expected:.2f}",
                f"{total.mean():.2f}",
                f"{min(simulation.speed_up for simulation in total.simulations):.2f}",
                str(total.slower),
            ]
        )
    title = "speed-up over plain decoding: ideal (every call costs the same), expected by the costs"
    return title, [*head, "mean of texts", "worst text", "slower"], lines


def _by_position(totals: Mapping[str, Total]) -> Table:
    lines = []
    for name, total in totals.items():
        drafted = dict(enumerate(total.counts["drafted_at"], start=1))
        accepted = dict(enumerate(total.counts["accepted_at"], start=1))
        shares = [
            f"{accepted.get(at, 0) / drafted[at]:.2f}" if at in drafted else "-" for at in POSITIONS
        ]
        lines.append([name, *shares])
    return "acceptance rate by position in the draft", ["contender", *map(str, POSITIONS)], lines
