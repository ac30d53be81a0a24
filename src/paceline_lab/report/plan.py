"""A recorded `paceline plan` as a record, and its charts: costs and break-even by rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline_lab.bench.record import FORM, VERSION, Record, Row, parse_record
from paceline_lab.report.shapes import Chart, Curves, Point


def is_plan(value: Any) -> bool:
    """True if parsed JSON looks like the output of `paceline plan`."""
    return isinstance(value, dict) and {"plain_milliseconds", "rows", "best"} <= value.keys()


def plan_record(value: Mapping[str, Any], name: str) -> Record:
    """Convert the JSON of `paceline plan` to a record with a row per T and cost table.

    Raises InvalidRequest if the JSON is not a plan; `name` names it in the message.
    """
    try:
        rows = [*_record_rows(f"{value['model']}, here", value)]
        if deep := value.get("deep"):
            rows += _record_rows(f"the same at a context of {deep['context']} tokens", deep)
        engine = value["engine"]
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{name} is not what `paceline plan` writes") from error
    head = {"made": "", "command": "paceline plan", "paceline": ""}
    parts: dict[str, Any] = {"settings": {}, "versions": {}, "machine": {}}
    about = {"form": FORM, "version": VERSION, "kind": "plan", "engine": engine, **head, **parts}
    return parse_record({**about, "rows": rows}, name)


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


def _record_rows(contender: str, value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    plain = {"rows": 1, "milliseconds": value["plain_milliseconds"], "ratio": 1.0}
    for row in (plain, *value["rows"]):
        even = row.get("break_even")
        measures = {"milliseconds": [row["milliseconds"]], "cost_ratio": [row["ratio"]]}
        yield {
            "case": f"T = {row['rows']}",
            "kind": "any",
            "contender": contender,
            "measures": measures if even is None else {**measures, "break_even": [even]},
            "at": {"rows": row["rows"]},
        }


def _points(rows: Sequence[Row], measure: str) -> Mapping[str, Sequence[Point]]:
    """Contender -> a point per T of 1 or more, ascending."""
    by_contender: dict[str, dict[float, Point]] = {}
    for row in rows:
        at, spread = row.at.get("rows", ""), row.spread(measure)
        if spread is not None and not isinstance(at, str) and at >= 1:
            by_contender.setdefault(row.contender, {})[float(at)] = (float(at), spread)
    return {name: [points[at] for at in sorted(points)] for name, points in by_contender.items()}
