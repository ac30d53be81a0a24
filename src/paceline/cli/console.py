"""What commands share: the model they load, and what they print.

Reports go to standard output, everything else to standard error.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidRequest
from paceline.storage.files import write_bytes, writing
from paceline.storage.report import Report, json_file

if TYPE_CHECKING:
    from paceline.decoding.step import Step
    from paceline.models import Progress
    from paceline.runtime.model import Model
    from paceline.runtime.result import Result
    from paceline.runtime.stream import Stream


def named(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Some of the options, by name."""
    return {name: getattr(options, name) for name in names}


def progress_of(options: argparse.Namespace) -> "Progress":
    """What is told about long work: silent with --quiet."""
    from paceline.models import Progress

    return Progress(quiet=getattr(options, "quiet", False))


def load_model(options: argparse.Namespace, rows: int | None = None, contexts: int = 1) -> "Model":
    """The model that the options name, with the drafters they name; see `paceline.load`."""
    from paceline.runtime.model import load

    chosen = getattr(options, "drafter", None) or "auto"  # bench run takes several
    drafters = [chosen] if isinstance(chosen, str) else list(chosen)
    if getattr(options, "probe", None) is not None:
        drafters.append(options.probe)

    return load(
        options.model,
        engine=options.engine,
        rows=options.rows if rows is None else rows,
        cache_tokens=options.cache_tokens,
        contexts=contexts,
        threads=options.threads,
        compute_units=options.compute_units,
        drafters=drafters,
        generation_config=getattr(options, "generation_config", "auto"),
        progress=progress_of(options),
    )


def print_stats(line: str, options: argparse.Namespace) -> None:
    """Print how an answer went, unless --quiet."""
    if not options.quiet:
        print(f"[{line}]", file=sys.stderr)


def print_ending(result: "Result", options: argparse.Namespace) -> None:
    """Print why an answer ended that the model had not ended itself, unless --quiet."""
    note = ending(result)
    if note is not None:
        print_stats(note, options)


def ending(result: "Result") -> str | None:
    """Why an answer was ended, and what goes on from there; None: the model ended it."""
    if result.finish_reason == "repetition":
        return "stopped: the answer repeats itself; --no-repetition-detection goes on"
    if result.finish_reason != "length":
        return None
    most = result.settings["max_tokens"]
    if most.value is None or result.completion_tokens < most.value:
        return (
            f"stopped after {result.completion_tokens} tokens: the context or the key/value cache "
            "is full"
        )
    if most.source == "request":
        return None
    return f"stopped after {most.value} tokens; --max-tokens -1 goes on"


def shower(
    options: argparse.Namespace, model: "Model", stream: "Stream"
) -> "Callable[[Step], None]":
    """A function that prints the steps of one answer.

    The answer goes to standard output; thoughts go to standard error, dim, unless --quiet.
    """
    if options.json:
        return lambda _: None
    from paceline.runtime.highlight import dim, tinted

    def plain(step: "Step") -> None:
        print(step.text, end="", flush=True)

    show: Callable[[Step], None] = plain
    if options.tint:
        show = tinted()
    if options.quiet or stream.thoughts is None:
        return show
    think, thinking = dim(), False

    def show_both(step: "Step") -> None:
        nonlocal thinking
        if step.reasoning:
            think(step.reasoning)
            thinking = True
        if thinking and step.text:
            think("\n\n")
            thinking = False
        show(step)

    return show_both


def print_value(options: argparse.Namespace, value: Any, text: str) -> None:
    """Print `value` with --json, else `text`."""
    if options.json:
        print(json.dumps(value, ensure_ascii=False))
    elif text:
        print(text)


def print_report(report: Report, options: argparse.Namespace) -> int:
    """Write and print what a command found out; returns its exit code."""
    if getattr(options, "output", None) is not None:
        with writing(options.output):
            write_bytes(options.output, json_file(report.value))
            if report.journal is not None:
                report.journal.unlink(missing_ok=True)
    print_value(options, report.value, report.text)
    if not options.json:
        for title, head, rows in report.tables:
            print(f"\n{title}")
            print_table(head, rows)
    return 0 if report.passed else 1


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under a head, as wide as the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def check_writable(path: Path | None) -> None:
    """Find out before minutes of work that their result could not be kept."""
    if path is None:
        return
    if path.is_dir():
        raise InvalidRequest(f"cannot write {path}: it is a folder")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise InvalidRequest(f"cannot write {path}: {path.parent} is not a folder to write to")
