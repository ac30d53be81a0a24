"""What several commands load and print with: reports to standard output, the rest to the other."""

import json
import os
import re
import stat
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from paceline.cli.options import ModelOptions, Output
from paceline.errors import InvalidRequest

if TYPE_CHECKING:
    from paceline.models import Progress
    from paceline.runtime.model import Model
    from paceline.storage.report import Report

STDIN = "-"
"""The name of standard input in place of a prompt or a file."""

_BYTE = re.compile("[\udc80-\udcff]")
"""What Python makes of a byte that is not UTF-8."""

_TEXT_SHARE = 3
"""1 / this of the characters of a text are such bytes at most; with more it is another encoding."""

_ANY_WIDTH = 10_000  # columns of a table that no terminal shows

_PATIENCE = 1.0  # seconds without standard input before a line names it


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
    """Print rows under a head, as wide as the terminal; with `gap` after an empty line.

    A pipe or a file gets each row on one line.
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(name, overflow="fold") for name in head), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else _ANY_WIDTH)
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


def read_text(path: Path, *, quiet: bool = False) -> str:
    """Return the text of a file; - is standard input.

    Raises InvalidRequest for one that cannot be read, or is not text.
    """
    if str(path) == STDIN:
        return read_stdin(quiet=quiet)
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    return as_unicode(text, str(path))


def read_stdin(*, quiet: bool = False) -> str:
    """Return the text of standard input. Raises InvalidRequest if it is not text.

    Prints a line if its end takes time to come, unless `quiet`.
    """
    notice = threading.Timer(_PATIENCE, say, ["[reading standard input to its end; Ctrl-C stops]"])
    notice.daemon = True
    if not quiet:
        notice.start()
    try:
        return as_unicode(sys.stdin.read(), "standard input")
    finally:
        notice.cancel()


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
    """Return the text that is piped in after a prompt, and print its size; empty without any.

    Other inputs than pipes, sockets and files may never end, and are not read.
    """
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or not a file of the system
        return ""
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        return ""
    report = (lambda _: None) if output.quiet else say
    if not _comes(sys.stdin.fileno()):
        report(
            f"[no standard input within {_PATIENCE:g} s: the prompt is answered without it; "
            "--file - waits for it, --no-stdin skips the wait]"
        )
        return ""
    text = read_stdin(quiet=output.quiet).strip("\n")
    if text.strip():
        size = len(text.encode("utf-8", "surrogatepass"))
        report(f"[added {size} bytes of standard input to the prompt; --no-stdin adds none]")
    return text


def _comes(descriptor: int) -> bool:
    """Return whether a byte or the end comes in time; takes nothing."""
    if sys.platform == "win32":  # which selects sockets alone
        import msvcrt
        from ctypes import byref, c_ulong, windll

        handle, size, end = msvcrt.get_osfhandle(descriptor), c_ulong(), monotonic() + _PATIENCE
        # It fails for a file, and at the end of a pipe.
        while windll.kernel32.PeekNamedPipe(handle, None, 0, None, byref(size), None):
            if size.value or monotonic() > end:
                return bool(size.value)
            sleep(_PATIENCE / 50)
        return True
    import select

    return bool(select.select([descriptor], [], [], _PATIENCE)[0])
