"""What a command hands to the command line, which prints it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, head, rows."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a command found out."""

    value: dict[str, Any]
    """For JSON; written to --output where there is one."""
    passed: bool = True
    text: str = ""
    tables: Sequence[Table] = field(default_factory=tuple)
    journal: Path | None = None
    """What kept the work while it was not done: removed when the result has been written."""


def json_file(value: Mapping[str, Any]) -> bytes:
    """A value as a file of JSON for people and `git diff`; if `rows` end it, each has a line."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    rows = value.get("rows")
    if [*value][-1:] == ["rows"] and isinstance(rows, Sequence) and rows:
        lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
        head = json.dumps({**value, "rows": []}, indent=1, ensure_ascii=False)
        text = head.removesuffix("]\n}") + f"\n{lines}\n ]\n}}"
    return f"{text}\n".encode()
