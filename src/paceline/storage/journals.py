"""Journals: JSON Lines files of finished work, so that an interrupted run can continue."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.storage.files import json_lines, locked, writing

Append = Callable[[dict[str, Any]], None]


def journal_of(output: Path) -> Path:
    """Return the path of the journal of a command that writes `output`."""
    return output.with_name(f"{output.name}.journal")


def read_journal(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return places and entries as of `json_lines`, in order; empty without a file.

    A last line without a newline is ignored: an interrupted run was writing it. Raises
    InvalidRequest if the file cannot be read, or a line is not a JSON object.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    return [*json_lines(content[: content.rfind(b"\n") + 1], path)]


@contextlib.contextmanager
def appending(path: Path) -> Iterator[Append]:
    """Yield a function that appends an entry, which is in the file when it returns.

    Raises InvalidRequest if the file cannot be written, or another run appends to it.
    """
    with contextlib.ExitStack() as stack:
        with writing(path):
            # Without a buffer: closing one would write bytes again that a full disk did not take.
            file = stack.enter_context(path.open("ab+", buffering=0))
            stack.enter_context(locked(path))
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

        def append(entry: dict[str, Any]) -> None:
            line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
            with writing(path):
                while line:  # a disk with little space takes a part
                    line = line[file.write(line) :]

        yield append
