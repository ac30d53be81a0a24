"""A recorded `paceline plan` as a record, to be drawn like others."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.errors import InvalidRequest
from paceline_lab.bench.record import FORM, VERSION, Record, parse_record


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
