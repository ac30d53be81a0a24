"""Speed-up of drafting by rows of a call and acceptance rate, computed from a cost table.

The formulas are in `decoding/costs.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.bench.record import FORM, VERSION, Record, parse_record
from paceline.decoding.costs import CostTable, break_even, speed_up
from paceline.errors import InvalidRequest

_CHANCES = (0.3, 0.5, 0.7, 0.9)


def plan_rows(cost: CostTable) -> list[dict[str, Any]]:
    """For every measured T > 1: cost, ratio to plain decoding, break-even and speed-ups.

    `break_even` is the acceptance chance per draft token at which a block of T is as fast as plain
    decoding; None if a chance of 1 is slower. `speed_up` maps chances to speed over plain decoding.
    """
    return [
        {
            "rows": rows,
            "milliseconds": cost(rows) * 1e3,
            "ratio": cost(rows) / cost(1),
            "break_even": break_even(cost, rows),
            "speed_up": {
                str(chance): speed_up(cost, [chance] * (rows - 1)) for chance in (*_CHANCES, 1.0)
            },
        }
        for rows in cost.seconds
        if rows > 1
    ]


def best(cost: CostTable, chance: float) -> tuple[int, float]:
    """(T, speed-up) with the largest speed-up at this chance per draft token; T = 1: no draft."""
    options = {rows: speed_up(cost, [chance] * (rows - 1)) for rows in (1, *cost.seconds)}
    rows = max(options, key=lambda count: options[count])
    return rows, options[rows]


def best_by_chance(cost: CostTable) -> Mapping[float, tuple[int, float]]:
    """`best` for several chances up to 1."""
    return {chance: best(cost, chance) for chance in (0.1, *_CHANCES, 1.0)}


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
