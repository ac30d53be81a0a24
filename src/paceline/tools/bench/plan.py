"""What speculation can bring on this machine, before anything is drafted.

The arithmetic is `decoding/costs.py`; here it is laid out for people.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.decoding.costs import CostTable, break_even, speed_up
from paceline.errors import InvalidRequest
from paceline.tools.bench.record import FORM, VERSION, Record, parse_record

ZAYA = {1: 0.112, 4: 0.499}
"""Seconds a call of the 8B soft-routed MoE model on the Apple Neural Engine, by rows, as its
authors measured them (the ZAYA experiment): four rows cost more than four calls."""

_CHANCES = (0.3, 0.5, 0.7, 0.9)


def plan(cost: CostTable) -> list[dict[str, Any]]:
    """For every measured T: cost, ratio to plain, break-even, and speed-up at some acceptances.

    `break_even` is the chance per draft token at which a block of T is as fast as plain decoding;
    None when even certainty does not pay. `speed_up` maps chances to tokens per second over
    plain's.
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
    """The T (1: do not draft) with the best speed-up at this chance per draft token, and that."""
    options = {rows: speed_up(cost, [chance] * (rows - 1)) for rows in (1, *cost.seconds)}
    rows = max(options, key=lambda each: options[each])
    return rows, options[rows]


def best_by_chance(cost: CostTable) -> Mapping[float, tuple[int, float]]:
    """`best` for chances from poor to sure."""
    return {chance: best(cost, chance) for chance in (0.1, *_CHANCES, 1.0)}


def is_plan(value: Any) -> bool:
    """Whether this looks like what `paceline plan` writes."""
    return isinstance(value, dict) and {"plain_milliseconds", "rows", "zaya"} <= value.keys()


def plan_record(value: Mapping[str, Any], name: str) -> Record:
    """What `paceline plan --json` prints as a record: a row for each T, here and in the experiment.

    Raises:
        InvalidRequest: it is not what `plan` writes; `name` is what the message calls it.
    """
    try:
        rows = [*_record_rows(f"{value['model']}, here", value)]
        if deep := value.get("deep"):
            rows += _record_rows(f"the same behind {deep['context']} tokens", deep)
        rows += _record_rows("ZAYA, Neural Engine", value["zaya"])
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
