"""Journals: JSON Lines files of finished work, so that an interrupted run can resume."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.storage.files import writing

Append = Callable[[dict[str, Any]], None]


def read_journal(path: Path, fields: Mapping[str, type]) -> list[dict[str, Any]]:
    """Entries of the file, in order; empty when there is no file.

    A last line without a newline is ignored: an interrupted run was writing it.

    Args:
        path: the file.
        fields: required fields of an entry and their types; a list has integers.

    Raises:
        InvalidRequest: it cannot be read, or a line is not such an entry.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise InvalidRequest(f"line {number} of {path} is not a JSON object")
        if not all(_is_a(entry.get(name), kind) for name, kind in fields.items()):
            expected = ", ".join(f"{name} ({kind.__name__})" for name, kind in fields.items())
            raise InvalidRequest(f"line {number} of {path} is not valid; expected {expected}")
        found.append(entry)
    return found


def _is_a(value: object, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and all(_is_a(each, int) for each in value)
    return isinstance(value, kind) and not isinstance(value, bool)


@contextlib.contextmanager
def appending(path: Path) -> Iterator[Append]:
    """Yield a function that appends an entry and flushes it before it returns.

    Raises InvalidRequest if the file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with writing(path):
            file = stack.enter_context(path.open("ab+"))
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

        def append(entry: dict[str, Any]) -> None:
            with writing(path):
                file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
                file.flush()

        yield append
