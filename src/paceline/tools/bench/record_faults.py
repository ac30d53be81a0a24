"""What keeps JSON from being a record (`record.py`): every fault, as a line for people."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def record_faults(value: Mapping[str, Any]) -> Iterator[str]:
    """Faults of a whole record of the right form and version; nothing where it is one."""
    yield from _head_faults(value)
    rows = value.get("rows")
    if not isinstance(rows, list):
        yield "rows is no list"
        return
    found = [
        f"row {number}: {fault}"
        for number, row in enumerate(rows, start=1)
        for fault in row_faults(row)
    ]
    yield from found or _repeated(rows)


def row_faults(row: Any) -> Iterator[str]:
    """What keeps a value from being a row; nothing where it is one."""
    if not isinstance(row, dict):
        yield "no object"
        return
    for name in ("case", "kind", "contender"):
        if not isinstance(row.get(name), str):
            yield f"{name} is {_short(row.get(name))}, expected text"
    if "measures" not in row:
        yield "it has no measures"
    for name, fits, expected in _PARTS:
        part = row.get(name, {})
        if not isinstance(part, dict):
            yield f"{name} is no object"
        else:
            for key, each in part.items():
                if not fits(each):
                    yield f"{name}: {_short(key)} is {_short(each)}, expected {expected}"
                elif name == "measures" and "ratio" in key.split("_") and min(each) <= 0:
                    yield f"{name}: {_short(key)} is {_short(min(each))}, expected more than 0"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _is_count(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_whole, value.values()))
    return all(map(_is_whole, value)) if isinstance(value, list) else _is_whole(value)


def _is_place(value: object) -> bool:
    return isinstance(value, str) or _is_number(value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


_PARTS = (
    ("measures", _are_numbers, "a list of numbers"),
    ("at", _is_place, "a number or text"),
    ("counts", _is_count, "whole numbers"),
    ("facts", lambda _: True, ""),
)


def _head_faults(value: Mapping[str, Any]) -> Iterator[str]:
    for name in ("kind", "made", "command", "paceline"):
        if not isinstance(value.get(name), str):
            yield f"{name} is {_short(value.get(name))}, expected text"
    for name in ("settings", "versions", "machine"):
        if not isinstance(value.get(name), dict):
            yield f"{name} is {_short(value.get(name))}, expected an object"
    for name in ("model", "engine"):
        found = value.get(name)
        texts = isinstance(found, dict) and all(isinstance(each, str) for each in found.values())
        if found is not None and not texts:
            yield f"{name} is {_short(found)}, expected an object of texts, or null"
    if not isinstance(value.get("suite_sha256"), str | None):
        yield f"suite_sha256 is {_short(value['suite_sha256'])}, expected text or null"
    if not isinstance(value.get("summary", {}), dict):
        yield f"summary is {_short(value['summary'])}, expected an object"


def _repeated(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    seen = set()
    for number, row in enumerate(rows, start=1):
        key = row["case"], row["contender"]
        if key in seen:
            yield f"row {number}: {key[0]!r} by {key[1]!r} is there already"
        seen.add(key)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
