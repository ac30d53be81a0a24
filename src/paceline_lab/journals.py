"""Journals: JSON Lines files of finished work, so that an interrupted run can resume.

The first entry of an output's journal describes the run: options, model, engine, machine. A journal
of another run is rejected. The CLI deletes the journal once it has written the result
(`Report.journal`).
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import InvalidRequest
from paceline.storage.files import held, json_lines, writing
from paceline.storage.validation import validated

Append = Callable[[dict[str, Any]], None]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    value: Any


def read_journal(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Places and entries as of `json_lines`, in order; empty when there is no file.

    A last line without a newline is ignored: an interrupted run was writing it. Raises
    InvalidRequest if the file cannot be read, or a line is no JSON object.
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


def journal_path(output: Path | None) -> Path | None:
    """Path of an output's journal; None without an output."""
    return None if output is None else output.with_name(f"{output.name}.journal")


class Journal:
    """Finished work of a run, by key."""

    def __init__(
        self,
        path: Path | None = None,
        entries: Sequence[_Entry] = (),
        append: Append = lambda _: None,
    ) -> None:
        self._path = path
        self._done = {entry.key: entry.value for entry in entries}
        self._append = append

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """What was finished under a key, as a `kind`; None if nothing was.

        Raises InvalidRequest if the journal has something else there.
        """
        if key not in self._done:
            return None
        return validated(kind, self._done[key], f"{key!r} in {self._path}")

    def add(self, key: str, value: Any) -> None:
        """Add what is finished, as JSON; it is on disk when the call returns."""
        self._append({"key": key, "value": value})
        self._done[key] = value


@contextlib.contextmanager
def resuming(output: Path | None, about: Mapping[str, Any]) -> Iterator[Journal]:
    """Open the journal of `output`, with the work of an interrupted run if there was one.

    `about`, the first entry, describes the run. Without an `output` nothing is on disk. Raises
    InvalidRequest if the journal cannot be read or written, or it is another run's.
    """
    path = journal_path(output)
    if path is None:
        yield Journal()
        return
    entries = read_journal(path)
    with appending(path) as append:
        if entries:
            _check_same_run(path, entries[0][1].get("about"), about)
        else:
            append({"about": dict(about)})
        done = [validated(_Entry, entry, where) for where, entry in entries[1:]]
        yield Journal(path, done, append)


def _check_same_run(path: Path, recorded: Any, about: Mapping[str, Any]) -> None:
    if not isinstance(recorded, dict):
        raise InvalidRequest(f"{path} is no journal of `paceline bench`; choose another output")
    for name in about:
        if recorded.get(name) != about[name]:
            was, now = _differing(recorded.get(name), about[name])
            raise InvalidRequest(
                f"{path} has an interrupted run with another {name} ({was}, not {now}); resume "
                "it with the same options, remove it, or choose another output"
            )


def _differing(was: Any, now: Any) -> tuple[str, str]:
    """Both values; of two objects only the fields that differ."""
    if isinstance(was, dict) and isinstance(now, dict):
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        return (
            ", ".join(f"{name} {was.get(name)}" for name in names),
            ", ".join(f"{name} {now.get(name)}" for name in names),
        )
    return str(was), str(now)
