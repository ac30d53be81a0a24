"""Two kinds of chart as plain data: dots by group, and curves over a number.

They have their values as tables, too. `drawing.py` draws them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.storage.report import Table
from paceline_lab.bench.record import Spread

Point = tuple[float, Spread]
"""(x, measured value)."""


@dataclass(frozen=True, slots=True)
class Dots:
    """Groups one below the other, with a mark per name: for ratios."""

    slug: str
    title: str
    note: str
    """How to read it, in a sentence or two."""
    measure: str
    """Label of the x axis."""
    groups: Sequence[str]
    series: Mapping[str, Sequence[Spread | None]]
    """Name -> one value per group."""
    line: float | None = None
    """Value of the baseline."""
    log: bool = False

    @property
    def table(self) -> Table:
        """The values: a line per group, a column per name."""
        rows = [
            [group, *("" if spread is None else str(spread) for spread in column)]
            for group, column in zip(
                self.groups, zip(*self.series.values(), strict=True), strict=True
            )
        ]
        return self.measure, ["", *self.series], rows


@dataclass(frozen=True, slots=True)
class Curves:
    """A line per name, over a number."""

    slug: str
    title: str
    note: str
    over: str
    """Label of the x axis."""
    measure: str
    series: Mapping[str, Sequence[Point]]
    line: float | None = None
    spacing: Literal["even", "linear"] = "even"
    """Of the x axis; `even`: equal distances between the numbers that occur."""
    digits: int = 2

    @property
    def places(self) -> list[float]:
        """The x values of all points, ascending."""
        return sorted({at for points in self.series.values() for at, _ in points})

    @property
    def table(self) -> Table:
        """The values: a line per x value, a column per name."""
        columns = [dict(points) for points in self.series.values()]
        rows = [
            [
                f"{at:g}",
                *(column[at].rounded(self.digits) if at in column else "" for column in columns),
            ]
            for at in self.places
        ]
        return self.measure, [self.over, *self.series], rows


Chart = Dots | Curves
