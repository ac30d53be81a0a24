"""The charts of a plan: cost of calls by rows, and the acceptance that drafting needs."""

from collections.abc import Iterator, Mapping, Sequence

from paceline_lab.bench.record import Row
from paceline_lab.report.shapes import Chart, Curves, Point


def cost_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Charts of the rows with `cost_ratio` and `break_even`."""
    if ratios := _points(rows, "cost_ratio"):
        numbers = sorted({at for points in ratios.values() for at, _ in points})
        yield Curves(
            "cost-by-rows",
            "Cost of a call by its rows",
            "Where the line is low, draft tokens are nearly free; over the dotted line drafting is "
            "slower even if every draft token is accepted.",
            "rows of a call (T)",
            "cost over that of plain decoding",
            ratios,
            1.0,
            bound=("as much as T plain calls", [(at, at) for at in numbers]),
            spacing="log",
            log=True,
        )
    if even := _points(rows, "break_even"):
        yield Curves(
            "break-even-by-rows",
            "Acceptance at which a block breaks even",
            "The acceptance chance per draft token at which a block is as fast as plain decoding. "
            "Without a mark it is slower even if every draft token is accepted.",
            "rows of a call (T)",
            "acceptance chance per draft token",
            even,
            spacing="log",
        )


def _points(rows: Sequence[Row], measure: str) -> Mapping[str, Sequence[Point]]:
    """Contender -> a point per T of 1 or more, ascending."""
    by_contender: dict[str, dict[float, Point]] = {}
    for row in rows:
        at, spread = row.at.get("rows", ""), row.spread(measure)
        if spread is not None and not isinstance(at, str) and at >= 1:
            by_contender.setdefault(row.contender, {})[float(at)] = (float(at), spread)
    return {name: [points[at] for at in sorted(points)] for name, points in by_contender.items()}
