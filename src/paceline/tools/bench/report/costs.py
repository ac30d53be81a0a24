"""The charts of a plan: what calls cost by their rows, and what drafting must bring."""

from collections.abc import Iterator, Mapping, Sequence

from paceline.tools.bench.record import Row
from paceline.tools.bench.report.shapes import Chart, Curves, Point


def cost_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """What calls cost by rows, and what drafting must bring."""
    if ratios := _points(rows, "cost_ratio"):
        numbers = sorted({at for each in ratios.values() for at, _ in each})
        yield Curves(
            "cost-by-rows",
            "What a call costs, by its rows",
            "Where the line stays low, guesses are nearly free; over the dotted line even guesses "
            "that always stand lose.",
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
            "How sure guesses must be for a block to pay",
            "The chance for each guess at which a block is as fast as plain decoding. Where there "
            "is no mark, even certainty does not pay.",
            "rows of a call (T)",
            "chance for each guess",
            even,
            spacing="log",
        )


def _points(rows: Sequence[Row], measure: str) -> Mapping[str, Sequence[Point]]:
    """Contender -> a point for each T of 1 or more, ascending."""
    found: dict[str, dict[float, Point]] = {}
    for row in rows:
        at, each = row.at.get("rows", ""), row.spread(measure)
        if each is not None and not isinstance(at, str) and at >= 1:
            found.setdefault(row.contender, {})[float(at)] = (float(at), each)
    return {name: [points[at] for at in sorted(points)] for name, points in found.items()}
