"""Options of answers, and printing of their steps, for `generate` and `chat`."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from paceline.cli import declare
from paceline.cli.console import (
    as_unicode,
    check_kept,
    load_model,
    print_status,
    read_text,
    screen_text,
)
from paceline.cli.options import MODEL_VARIABLE, ModelOptions, Output
from paceline.errors import InvalidRequest
from paceline.options import STRUCTURES, Options

if TYPE_CHECKING:
    from paceline.decoding.types import Step
    from paceline.models import ModelFiles
    from paceline.runtime.model import Model
    from paceline.runtime.result import Result
    from paceline.runtime.stream import Stream

_STRUCTURE = re.compile(r"^\s*(\{|\w[\w-]*\s*::=|start\s*:)", re.MULTILINE)
"""Matches the beginning of a schema, or a line of a grammar: not a file name."""

_TRIAL_SHARE = 3  # the reciprocal of a suggested model's maximum share of memory
_TRIAL_SPEED = 5  # minimum expected tokens/s of a suggested model
_CORE_BANDWIDTH, _BANDWIDTH = 5e9, 40e9
"""Estimated bytes of weights per second, read by one CPU and by all CPUs of a machine. Two CPUs of
shared servers read 7 to 19 GB/s of SmolLM2 135M and 10 of a 1.7B in Q4_K_M (November 2026)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerArguments:
    """Command-line options for generation."""

    given: Options
    """Values as on the command line; missing options are None."""
    stats: Annotated[
        bool, Option("--stats", help="print speed, draft acceptance, engine and seed")
    ] = False
    tint: Annotated[bool, Option("--tint", help="color the accepted draft tokens")] = False
    keep: Annotated[
        bool,
        Option(
            "--keep/--no-keep",
            envvar="PACELINE_KEEP",
            rich_help_panel="Speculation",
            help="save answers, and messages typed in a chat, on this machine, and draft later "
            "answers from them; `paceline forget` removes both",
        ),
    ] = False

    def options(self, *, raw: bool = False) -> Options:
        """Return the options of `Model.stream`, without missing ones."""
        options: Any = {"repetition_detection": not self.given.get("ignore_eos"), "raw": raw}
        for name, written in self.given.items():
            if written not in (None, ()):
                options[name] = value_of(name, written)
        return cast("Options", options)


def value_of(name: str, written: Any) -> Any:
    """Return an option's Python value for its value on the command line."""
    if name in STRUCTURES:
        return _structure(name, written)
    if name == "logit_bias":
        return dict(written)
    if name == "system":
        return as_unicode(written, "--system")
    return None if (name, written) == ("max_tokens", -1) else written


def _structure(name: str, value: str) -> str:
    """Return the text of a schema, grammar or expression: the value, or the content of its file.

    The schema `json` allows any object, as in Ollama.
    """
    if name == "json_schema" and value == "json":
        return '{"type": "object"}'
    given = name == "regex" or not value or _STRUCTURE.search(value)
    text = value if given else read_text(Path(value))
    if name == "json_schema":
        try:
            json.loads(text)
        except ValueError as error:
            source = "the schema" if given else value
            raise InvalidRequest(f"{source} is not JSON: {error}") from error
    return text


def load_for_answers(
    model: ModelOptions,
    answer: AnswerArguments,
    output: Output,
    check: "Callable[[ModelFiles], object]",
    **more: Any,
) -> "Model":
    """Load the model, with `MAX_TOKENS` as the default limit; `check` and `more` are for `load`."""
    given = answer.given
    drafters = [given.get("drafter") or "auto", *filter(None, [given.get("probe")])]
    check_kept(drafters, keep=answer.keep)
    if not output.quiet and (notice := trial_notice(model.model)):
        print_status(notice)
    loaded = load_model(
        model,
        output,
        drafters=drafters,
        generation_config=given.get("generation_config") or "auto",
        keep=answer.keep,
        check=check,
        **more,
    )
    if given.get("think") is False and not (output.quiet or loaded.files.thinking.switch(False)):
        print_status(f"[--no-think has no effect: {loaded.files.name} does not support reasoning]")
    loaded.defaults = replace(loaded.defaults, fallback={"max_tokens": declare.MAX_TOKENS})
    return loaded


def trial_notice(name: str) -> str | None:
    """Return a notice for the first use of the default model, or None in all other cases."""
    from paceline.models import DEFAULT_MODEL, cache_dir, list_models
    from paceline.storage.files import megabytes
    from paceline.system.machine import cpu_cores, memory_bytes

    if name != DEFAULT_MODEL or any((cache_dir() / "models").glob(f"{DEFAULT_MODEL}*")):
        return None
    notice = f"{name} is a small model to try paceline with."
    bandwidth = min(cpu_cores() * _CORE_BANDWIDTH, _BANDWIDTH)
    max_bytes = min(memory_bytes() / _TRIAL_SHARE, bandwidth / _TRIAL_SPEED)
    models = [model for model in list_models() if model.to_fetch <= max_bytes]
    best = max(models, key=lambda model: model.to_fetch, default=None)
    if best is None or best.name == name:
        return notice
    return (
        f"{notice} A better one for this machine is {best.name}, estimated at "
        f"{bandwidth / best.to_fetch:.0f} tokens/s on {cpu_cores()} CPUs: `paceline pull "
        f"{best.name}` ({megabytes(best.to_fetch)}), then -m {best.name} or "
        f"{MODEL_VARIABLE}={best.name}."
    )


def step_printer(
    answer: AnswerArguments, output: Output, stream: "Stream"
) -> "Callable[[Step], None]":
    """Return a function that prints the steps of one answer; with --json it prints nothing.

    Reasoning goes to standard error, dim, unless --quiet.
    """

    def printed(step: "Step") -> None:
        print(screen_text(step.text, sys.stdout), end="", flush=True)

    if output.json:
        return lambda _: None
    show = highlighter() if answer.tint else printed
    if output.quiet or stream.request.thoughts is None:
        return show
    think, thinking = printer("dim", stderr=True), False

    def show_both(step: "Step") -> None:
        nonlocal thinking
        if step.reasoning:
            think(step.reasoning, "")
            thinking = True
        if thinking and step.text:
            think("\n\n", "")
            thinking = False
        show(step)

    return show_both


def highlighter() -> "Callable[[Step], None]":
    """Return a function that prints a step with its accepted draft tokens underlined and green."""
    show = printer("green underline")

    def show_step(step: "Step") -> None:
        texts = [piece.final for piece in step.pieces]
        show("".join(texts[: step.accepted]), "".join(texts[step.accepted :]))

    return show_step


def printer(style: str, *, stderr: bool = False) -> "Callable[[str, str], None]":
    """Return a function that prints a text in a style, then one without.

    Rich detects the terminal's features: no colors with NO_COLOR, and plain text if the output is
    not a terminal, unless FORCE_COLOR is set.
    """
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.style import Style

    console, parsed = Console(stderr=stderr), Style.parse(style)

    def show(styled: str, plain: str) -> None:
        # crop=False: lines are not wrapped, and tabs stay tabs.
        texts = [screen_text(text, console.file) for text in (styled, plain)]
        segments = Segments([Segment(texts[0], parsed), Segment(texts[1])])
        console.print(segments, end="", crop=False)

    return show


def print_end(
    stream: "Stream", output: Output, statistics: str | None = None, *, chat: bool = False
) -> None:
    """End an answer's line, then print why it was stopped and the statistics, unless --quiet.

    `chat` is true where options are changed with /set.
    """
    print()
    if not output.quiet:
        structured = stream.request.constraint is not None
        for line in (ending(stream.result, chat=chat, structured=structured), statistics):
            if line is not None:
                print_status(f"[{line}]")


def short_statistics(result: "Result") -> str | None:
    """Return the line under an answer in a chat, or None if it has no tokens."""
    stats = result.stats
    if not result.token_ids:
        return None
    if not stats.steps:
        return "1 token"
    line = f"{result.completion_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s"
    if stats.drafted:
        line += f", {stats.accepted} of {stats.drafted} drafts accepted"
    return line


def ending(result: "Result", *, chat: bool = False, structured: bool = False) -> str | None:
    """Return why an answer was stopped and how to continue, or None if it ended as requested."""
    if result.finish_reason == "repetition":
        option = "/set repetition_detection off" if chat else "--no-repetition-detection"
        return f"stopped: the answer repeats itself; {option} turns this off"
    if result.finish_reason != "length":
        return None
    limit, count = result.settings["max_tokens"], result.completion_tokens
    if limit.value is None or count < limit.value:
        return f"stopped after {count} tokens: the context or the key/value cache is full"
    asked = limit.source == "request" and not structured
    option = "/set max_tokens" if chat else "--max-tokens"
    return None if asked else f"stopped after {limit.value} tokens; {option} -1 removes this limit"
