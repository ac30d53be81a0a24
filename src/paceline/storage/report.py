"""Results of commands, which the command line prints."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, column names, rows."""


@dataclass(frozen=True, slots=True)
class Report:
    value: dict[str, Any]
    """The JSON output; also written to --output."""
    passed: bool = True
    text: str = ""
    tables: Sequence[Table] = field(default_factory=tuple)


def json_file(value: Mapping[str, Any]) -> bytes:
    """Indented JSON for people and `git diff`; if `rows` is the last key, one line per row."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    rows = value.get("rows")
    if [*value][-1:] == ["rows"] and isinstance(rows, Sequence) and rows:
        lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
        head = json.dumps({**value, "rows": []}, indent=1, ensure_ascii=False)
        text = head.removesuffix("]\n}") + f"\n{lines}\n ]\n}}"
    return f"{text}\n".encode()
