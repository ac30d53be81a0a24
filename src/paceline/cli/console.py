"""Loading and printing for several commands: reports go to standard output, the rest to stderr."""

import codecs
import json
import os
import stat
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import IO, TYPE_CHECKING, Any

from paceline.cli.options import ModelOptions, Output
from paceline.errors import InvalidRequest
from paceline.storage.text import decode, path_text, text_bytes, visible

if TYPE_CHECKING:
    from paceline.models import Progress
    from paceline.runtime.model import Model
    from paceline.storage.report import Report

STDIN = "-"
"""The name of standard input in place of a prompt or a file."""

_ANY_WIDTH = 10_000  # columns of a table that no terminal shows

_PATIENCE = 1.0  # seconds without standard input before a notice


def print_status(text: str) -> None:
    """Print a line that is not part of an answer."""
    print(visible(text), file=sys.stderr, flush=True)


def print_error(error: object) -> None:
    """Print an error: a line, and an indented one for each further fault."""
    print_status(visible(f"paceline: {error}", line=True))


def screen_text(text: str, stream: IO[str]) -> str:
    """Return a model's text for `stream`: unchanged, unless that is a terminal."""
    return visible(text) if stream.isatty() else text


def json_text(value: Any) -> str:
    """Return `value` as JSON, in ASCII if standard output or a terminal needs that."""
    text = json.dumps(value, ensure_ascii=False, default=path_text)
    is_utf8 = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
    return text if is_utf8 and text == visible(text) else json.dumps(value, default=path_text)


def progress_of(output: Output) -> "Progress":
    """Return the progress of long work; silent with --quiet."""
    from paceline.models import Progress

    return Progress(quiet=output.quiet)


def load_model(
    options: ModelOptions, output: Output, *, drafters: Sequence[str] = (), **more: Any
) -> "Model":
    """Load a model; arguments of `load` in `more` override those of `options`."""
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
    """Disable all downloads if `offline`; call this before looking up a model."""
    if offline:
        from paceline.models import go_offline

        go_offline()


def print_value(output: Output, value: Any, text: str) -> None:
    """Print `value` with --json, else `text`."""
    if output.json:
        print(json_text(value))
    elif text:
        print(visible(text))


def print_report(
    report: "Report", output: Output, path: Path | None = None, *, journal: bool = False
) -> int:
    """Print a report, and write it to `path`; return the exit code.

    With `journal`, also remove the journal that the command kept for it.
    """
    from paceline.storage.files import write_bytes, writing
    from paceline.storage.journals import journal_of
    from paceline.storage.report import json_file

    if path is not None:
        with writing(path):
            write_bytes(path, json_file(report.value))
            if journal:
                journal_of(path).unlink(missing_ok=True)
    print_value(output, report.value, report.text)
    if not output.json:
        for title, head, rows in report.tables:
            print(f"\n{visible(title, line=True)}")
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
        table.add_row(*(Text(visible(str(cell), line=True)) for cell in row))
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

    Raises InvalidRequest for a file that cannot be read, or is not text.
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

    Prints a line if the end of input is delayed, unless `quiet`.
    """
    notice = threading.Timer(
        _PATIENCE, print_status, ["[reading standard input to its end; Ctrl-C stops]"]
    )
    notice.daemon = True
    if not quiet:
        notice.start()
    try:
        return as_unicode(sys.stdin.read(), "standard input")
    finally:
        notice.cancel()


def as_unicode(text: str, source: str) -> str:
    """Return the text, which may have bytes of a different locale, as `decode` does."""
    return decode(text_bytes(text), source, print_status)


def piped_text(output: Output) -> str:
    """Return the text that is piped in after a prompt, and print its size; empty without any.

    Inputs other than pipes, sockets and files may never end, and are not read.
    """
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or not a file of the system
        return ""
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        return ""
    report = (lambda _: None) if output.quiet else print_status
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
    """Return whether a byte or the end arrives in time, without reading it."""
    if sys.platform == "win32":  # where `select` supports only sockets
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
