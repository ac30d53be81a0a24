"""A file of JSON lines that grows as work gets done, so that a stopped run goes on where it was."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest

Append = Callable[[dict[str, Any]], None]


def read_journal(path: Path) -> list[dict[str, Any]]:
    """What is in the file, in order; nothing when there is none.

    A last line without its end is what a stopped run was writing: it does not count.

    Raises:
        InvalidRequest: it cannot be read, or a line is no JSON object.
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
        except ValueError as error:
            raise InvalidRequest(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise InvalidRequest(f"line {number} of {path} is not a JSON object")
        found.append(entry)
    return found


@contextmanager
def appending(path: Path) -> Iterator[Append]:
    """Write entries at the file's end, each there for good when the call returns.

    Raises:
        InvalidRequest: it cannot be written.
    """
    try:
        with path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

            def append(entry: dict[str, Any]) -> None:
                file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
                file.flush()

            yield append
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from error
