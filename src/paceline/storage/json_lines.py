"""Journals: JSON Lines files of finished work, so that an interrupted run can resume."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import InvalidRequest
from paceline.storage.files import held, writing
from paceline.storage.validation import validated

Append = Callable[[dict[str, Any]], None]

_T = TypeVar("_T")


def read_entries(path: Path, kind: type[_T]) -> list[_T]:
    """The entries of `read_journal`, validated as a `kind`.

    Raises InvalidRequest if the file cannot be read; or for the first line that is no such entry,
    with all its faults.
    """
    numbered = enumerate(read_journal(path), start=1)
    return [validated(kind, entry, f"line {number} of {path}") for number, entry in numbered]


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Entries of the file, in order; empty when there is no file.

    A last line without a newline is ignored: an interrupted run was writing it. Raises
    InvalidRequest if the file cannot be read, or a line is no JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise InvalidRequest(f"line {number} of {path} is not a JSON object")
        entries.append(entry)
    return entries


@contextlib.contextmanager
def appending(path: Path) -> Iterator[Append]:
    """Yield a function that appends an entry, which is in the file when it returns.

    Raises InvalidRequest if the file cannot be written, or another run appends to it.
    """
    with contextlib.ExitStack() as stack:
        with writing(path):
            # Without a buffer: closing one would write again what a full disk did not take.
            file = stack.enter_context(path.open("ab+", buffering=0))
            stack.enter_context(held(path))
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

        def append(entry: dict[str, Any]) -> None:
            line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
            with writing(path):
                while line:  # a disk with little space takes a part
                    line = line[file.write(line) :]

        yield append
