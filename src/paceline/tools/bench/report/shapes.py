"""Three kinds of chart, as plain data: dots by group, curves over a number, stacked bars.

Each knows its figures as a table. What they look like is `drawing.py`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.storage.report import Table
from paceline.tools.bench.record import Spread

Point = tuple[float, Spread]
"""Where, and what was found there."""


@dataclass(frozen=True, slots=True)
class Dots:
    """Groups below each other, a mark for each name in a group: good for ratios."""

    slug: str
    title: str
    note: str
    """How it is read, in a sentence or two."""
    measure: str
    """What the marks are."""
    groups: Sequence[str]
    found: Mapping[str, Sequence[Spread | None]]
    """Name -> one for each group."""
    line: float | None = None
    """Where nothing is gained and nothing lost."""
    log: bool = False

    @property
    def table(self) -> Table:
        """The same in figures."""
        rows = [
            [group, *("" if each is None else str(each) for each in column)]
            for group, column in zip(
                self.groups, zip(*self.found.values(), strict=True), strict=True
            )
        ]
        return self.measure, ["", *self.found], rows


@dataclass(frozen=True, slots=True)
class Curves:
    """A line for each name, over a number."""

    slug: str
    title: str
    note: str
    over: str
    """What runs to the right."""
    measure: str
    found: Mapping[str, Sequence[Point]]
    line: float | None = None
    bound: tuple[str, Sequence[tuple[float, float]]] | None = None
    """A line that was not measured: its name and points."""
    spacing: Literal["even", "log", "linear"] = "even"
    """`even` gives every number that occurs the same room."""
    log: bool = False
    """Whether the measure is drawn by its logarithm."""
    digits: int = 2

    @property
    def places(self) -> list[float]:
        """The numbers at which something was found, ascending."""
        return sorted({at for points in self.found.values() for at, _ in points})

    @property
    def table(self) -> Table:
        """The same in figures."""
        columns = [dict(points) for points in self.found.values()]
        rows = [
            [f"{at:g}", *(self._cell(column[at]) if at in column else "" for column in columns)]
            for at in self.places
        ]
        return self.measure, [self.over, *self.found], rows

    def _cell(self, each: Spread) -> str:
        texts = [f"{value:.{self.digits}f}" for value in each]
        return texts[0] if len(set(texts)) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


@dataclass(frozen=True, slots=True)
class Stacks:
    """A bar for each name, put together of parts."""

    slug: str
    title: str
    note: str
    measure: str
    names: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    """Part -> one value for each name."""

    @property
    def table(self) -> Table:
        """The same in figures."""
        columns = [*zip(*self.parts.values(), strict=True)]
        rows = [
            [name, *(f"{value:.2f}" for value in column), f"{sum(column):.2f}"]
            for name, column in zip(self.names, columns, strict=True)
        ]
        return self.measure, ["", *self.parts, "all"], rows


Chart = Dots | Curves | Stacks
