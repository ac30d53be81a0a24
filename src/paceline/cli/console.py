"""What several commands load and print with: reports to standard output, the rest to the other."""

import json
import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import ModelOptions, Output
from paceline.errors import InvalidRequest

if TYPE_CHECKING:
    from paceline.models import Progress
    from paceline.runtime.model import Model
    from paceline.storage.report import Report

_BYTE = re.compile("[\udc80-\udcff]")
"""What Python makes of a byte that is not UTF-8."""

_TEXT_SHARE = 3
"""1 / this of the characters of a text are such bytes at most; with more it is another encoding."""

_PATIENCE = 2.0  # seconds without a word on what a command waits for


def say(text: str) -> None:
    """Print a line that is no part of an answer."""
    print(text, file=sys.stderr, flush=True)


def progress_of(output: Output) -> "Progress":
    """Prints the progress of long work; nothing with --quiet."""
    from paceline.models import Progress

    return Progress(quiet=output.quiet)


def load_model(
    options: ModelOptions, output: Output, *, drafters: Sequence[str] = (), **more: Any
) -> "Model":
    """Load a model; `more` has arguments of `load`, before those that `options` has, too."""
    arguments = asdict(options)
    obey_offline(arguments.pop("offline"))
    from paceline.runtime.load import load

    arguments |= {"drafters": drafters or ["auto"], **more}
    return load(arguments.pop("model"), progress=progress_of(output), **arguments)


def check_kept(drafters: Sequence[str], *, keep: bool) -> None:
    """Raise InvalidRequest for the drafter `kept` without --keep: it would draft nothing."""
    from paceline.drafters import DrafterSpec

    if not keep and any(DrafterSpec.parse(drafter).has("kept") for drafter in drafters):
        raise InvalidRequest(
            "the drafter kept needs kept answers; --keep keeps those of this command, and drafts "
            "from earlier ones"
        )


def obey_offline(offline: bool) -> None:
    """With --offline, fetch nothing from now on; call it before anything is looked up."""
    if offline:
        from paceline.models import go_offline

        go_offline()


def print_value(output: Output, value: Any, text: str) -> None:
    """Print `value` with --json, else `text`."""
    if output.json:
        print(json.dumps(value, ensure_ascii=False))
    elif text:
        print(text)


def print_report(report: "Report", output: Output, path: Path | None = None) -> int:
    """Print a report, and write it to `path`; returns the exit code."""
    from paceline.storage.files import write_bytes, writing
    from paceline.storage.report import json_file

    if path is not None:
        with writing(path):
            write_bytes(path, json_file(report.value))
            if report.journal is not None:
                report.journal.unlink(missing_ok=True)
    print_value(output, report.value, report.text)
    if not output.json:
        for title, head, rows in report.tables:
            print(f"\n{title}")
            print_table(head, rows)
    return 0 if report.passed else 1


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, gap: bool = False) -> None:
    """Print rows under a head, as wide as the terminal; with `gap` after an empty line."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(name, overflow="fold") for name in head), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 120)
    if gap:
        console.print()
    console.print(table)


def check_writable(path: Path | None) -> None:
    """Raise InvalidRequest before minutes of work whose result could not be written."""
    if path is None:
        return
    if path.is_dir():
        raise InvalidRequest(f"cannot write {path}: it is a folder")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise InvalidRequest(f"cannot write {path}: {path.parent} is not a folder to write to")


def read_text(path: Path) -> str:
    """The text of a file. Raises InvalidRequest for one that cannot be read, or is no text."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    return as_unicode(text, str(path))


def read_stdin() -> str:
    """The text of standard input. Raises InvalidRequest if it is no text."""
    return as_unicode(sys.stdin.read(), "standard input")


def as_unicode(text: str, source: str) -> str:
    """The text with U+FFFD for each byte that is not UTF-8, after a line that says where one is.

    Raises InvalidRequest for a text of another encoding, and for what is no text.
    """
    wrong = _BYTE.search(text)
    if wrong is None:
        return text
    before = text[: wrong.start()]
    column = len(before.rpartition("\n")[2].encode("utf-8", "surrogatepass")) + 1
    where = (
        f"{source} is not UTF-8 text: line {before.count(chr(10)) + 1}, byte {column} is "
        f"0x{ord(wrong[0]) & 0xFF:02X}"
    )
    readable, count = _BYTE.subn("\ufffd", text)
    if count * _TEXT_SHARE > len(text) or "\0" in text:
        raise InvalidRequest(f"{where}; `iconv -t UTF-8` converts text of another encoding")
    say(f"[{where}; such bytes, {count} in all, are read as U+FFFD]")
    return readable


def piped_text(output: Output) -> str:
    """The text of a pipe or file at standard input; empty for others, which may never end."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or not a file of the system
        return ""
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)):
        return ""
    if not output.quiet and sys.platform != "win32":
        import select

        if not select.select([sys.stdin], [], [], _PATIENCE)[0]:
            say("reading standard input, which is a part of the prompt; Ctrl-C stops")
    return read_stdin()
