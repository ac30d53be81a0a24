"""Aggregates of simulations: totals, rows of a record, and tables to print."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any

from paceline.storage.report import Table
from paceline_lab.bench.ab_test import PLAIN
from paceline_lab.bench.record import Row
from paceline_lab.simulate.replay import Simulation

POSITIONS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31)
"""Printed positions in a draft."""

_MAX_TEXT_ROWS = 200
"""With more texts, a record has a row per kind of text, not per text."""


@dataclass(slots=True)
class Total:
    """All texts with one drafter and policy."""

    simulations: list[Simulation] = field(default_factory=list)
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)

    def add(self, simulation: Simulation) -> None:
        self.simulations.append(simulation)
        self.drafted_at.update(dict(enumerate(simulation.counters.drafted_at)))
        self.accepted_at.update(dict(enumerate(simulation.counters.accepted_at)))

    def sum(self, value_of: Callable[[Simulation], float]) -> float:
        return sum(map(value_of, self.simulations))

    @property
    def steps(self) -> int:
        return int(self.sum(lambda simulation: simulation.counters.steps))

    @property
    def ideal(self) -> float:
        """Tokens per step: speed over plain decoding if every call cost the same."""
        return self.sum(lambda simulation: simulation.decoded) / max(self.steps, 1)

    @property
    def expected(self) -> float:
        """Speed over plain decoding by the cost table, all texts together."""
        took = self.sum(lambda simulation: simulation.seconds)
        return self.sum(lambda simulation: simulation.plain_seconds) / took if took else 1.0

    def mean(self) -> float:
        """Geometric mean of the texts' expected speed-ups."""
        return geometric_mean([simulation.speed_up for simulation in self.simulations])

    @property
    def slower(self) -> int:
        """Texts that take longer than by plain decoding."""
        return sum(simulation.speed_up < 1 for simulation in self.simulations)

    def of(self, kind: str) -> "Total":
        return total_of(
            simulation for simulation in self.simulations if simulation.recording.kind == kind
        )

    def row(self, case: str, kind: str, contender: str) -> Row:
        drafted = int(self.sum(lambda simulation: simulation.counters.drafted))
        accepted = int(self.sum(lambda simulation: simulation.counters.accepted))
        measures = {
            "ratio": self.expected,
            "tokens_per_step": self.ideal,
            "acceptance_rate": accepted / max(drafted, 1),
            "decode_seconds": self.sum(lambda simulation: simulation.seconds),
        }
        counts = {
            "steps": self.steps,
            "drafted": drafted,
            "accepted": accepted,
            "drafted_by": self._sums(lambda simulation: simulation.counters.drafted_by),
            "accepted_by": self._sums(lambda simulation: simulation.counters.accepted_by),
            "drafted_at": _in_order(self.drafted_at),
            "accepted_at": _in_order(self.accepted_at),
        }
        return self._row(case, kind, contender, measures, counts)

    def plain_row(self, case: str, kind: str) -> Row:
        """Plain decoding of the same texts as a row."""
        seconds = self.sum(lambda simulation: simulation.plain_seconds)
        measures = {"ratio": 1.0, "tokens_per_step": 1.0, "decode_seconds": seconds}
        steps = int(self.sum(lambda simulation: simulation.decoded))
        counts = {"steps": steps, "drafted": 0, "accepted": 0}
        return self._row(case, kind, PLAIN, measures, counts)

    def _row(
        self,
        case: str,
        kind: str,
        contender: str,
        measures: Mapping[str, float],
        counts: Mapping[str, Any],
    ) -> Row:
        recordings = [simulation.recording for simulation in self.simulations]
        facts = {
            "tokens": sum(len(recording.answer) for recording in recordings),
            "prompt_tokens": sum(len(recording.prompt) for recording in recordings),
        }
        single = {name: [value] for name, value in measures.items()}
        return Row(case, kind, contender, single, counts=counts, facts=facts)

    def _sums(self, counts_of: Callable[[Simulation], Mapping[str, int]]) -> dict[str, int]:
        sums = Counter[str]()
        for simulation in self.simulations:
            sums.update(counts_of(simulation))
        return dict(sums)


def total_of(simulations: Iterable[Simulation]) -> Total:
    total = Total()
    for simulation in simulations:
        total.add(simulation)
    return total


def rows_of(totals: Mapping[str, Total]) -> Iterator[Row]:
    """Rows of plain decoding and of all contenders: per text, or per kind of many texts."""
    first = next(iter(totals.values()))
    if len(first.simulations) > _MAX_TEXT_ROWS:
        for kind in kinds_of(first):
            count = len(first.of(kind).simulations)
            yield first.of(kind).plain_row(f"{count} texts", kind)
            yield from (
                total.of(kind).row(f"{count} texts", kind, n) for n, total in totals.items()
            )
        return
    for place, simulation in enumerate(first.simulations):
        case, kind = simulation.recording.id, simulation.recording.kind
        yield total_of([simulation]).plain_row(case, kind)
        for name, total in totals.items():
            yield total_of([total.simulations[place]]).row(case, kind, name)


def kinds_of(total: Total) -> list[str]:
    """Kinds of texts, in order of appearance."""
    return list(dict.fromkeys(simulation.recording.kind for simulation in total.simulations))


def tables(totals: Mapping[str, Total]) -> Iterator[Table]:
    yield _overall(totals)
    kinds = kinds_of(next(iter(totals.values())))
    if len(kinds) > 1:
        means = ((kind, [total.of(kind).mean() for total in totals.values()]) for kind in kinds)
        lines = [[kind, *(f"{mean:.2f}" for mean in kind_means)] for kind, kind_means in means]
        yield "expected speed-up, geometric means by kind", ["kind", *totals], lines
    yield _by_position(totals)


def summary(total: Total) -> dict[str, Any]:
    drafted, accepted = total.drafted_at, total.accepted_at
    return {
        "passes": total.steps,
        "tokens": int(total.sum(lambda simulation: simulation.decoded)),
        "ideal": total.ideal,
        "expected": total.expected,
        "expected_geometric_mean": total.mean(),
        "expected_worst": min(simulation.speed_up for simulation in total.simulations),
        "slower": total.slower,
        "accepted_by_place": [accepted[at] / drafted[at] for at in sorted(drafted)],
    }


def _overall(totals: Mapping[str, Total]) -> Table:
    head = ["contender", "tokens", "steps", "drafted", "accepted", "ideal", "expected"]
    lines = []
    for name, total in totals.items():
        drafted = total.sum(lambda simulation: simulation.counters.drafted)
        accepted = total.sum(lambda simulation: simulation.counters.accepted)
        lines.append(
            [
                name,
                f"{total.sum(lambda simulation: simulation.decoded):.0f}",
                str(total.steps),
                f"{drafted:.0f}",
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
        shares = (_share(total.accepted_at[at - 1], total.drafted_at[at - 1]) for at in POSITIONS)
        lines.append([name, *shares])
    return "acceptance rate by position in the draft", ["contender", *map(str, POSITIONS)], lines


def _in_order(counts: Counter[int]) -> list[int]:
    return [counts[place] for place in sorted(counts)]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"
