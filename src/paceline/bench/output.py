"""What a command hands to the command line, which prints it."""

from collections.abc import Sequence
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
