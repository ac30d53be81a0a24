"""Declarations of options: those of an answer, from `paceline.options`, and common kinds.

Every parser raises ValueError. Invariant: every number is checked when the command line is read, so
that no command gets a number that is not finite or is out of its range: `int` and `float` without a
parser are not used as the type of an option.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from paceline.cli import complete
from paceline.options import BIAS, BIAS_TOKEN, COUNT, OPTIONS, About, IntRange, Range, shorten
from paceline.system.machine import cpu_cores


@dataclass(frozen=True, slots=True)
class IntOrKeyword:
    """A whole number from `min_value` to `max_value`, or a word for a value."""

    min_value: int
    word: str
    meaning: str
    value: int | str | None
    max_value: int | None = None

    def __call__(self, text: str) -> Any:
        if text == self.word:
            return self.value
        try:
            return IntRange(self.min_value, self.max_value)(text)
        except ValueError as error:
            raise ValueError(f"{error}, nor {self.meaning}") from None


@dataclass(frozen=True, slots=True)
class IntList:
    """A parser of comma-separated whole numbers in a range, or of one word instead."""

    number: Range
    word: str | None = None

    def __call__(self, text: str) -> tuple[int, ...] | str:
        return text if text == self.word else tuple(self.number(part) for part in text.split(","))


def _bias(text: str) -> tuple[int, float]:
    """Return the token id and bias of TOKEN=BIAS."""
    token, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{shorten(text)} is not TOKEN=BIAS, as in 42=-5")
    return BIAS_TOKEN(token), BIAS(value)


def json_object(text: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise ValueError(f"{shorten(text)} is not a JSON object")


_CPUS = cpu_cores()
THREADS = IntOrKeyword(1, "auto", f"auto; there are {_CPUS} CPUs", None, _CPUS)
_LIMIT = IntOrKeyword(1, "-1", "-1 for no limit", -1)

count = partial(Option, parser=COUNT)
file = partial(Option, parser=Path, metavar="FILE")
folder = partial(Option, parser=Path, metavar="FOLDER")
several = partial(Option, default_factory=list, show_default=False)
drafters = partial(several, "--drafter", autocompletion=complete.drafters)

MAX_TOKENS = 2048
"""Maximum tokens of an answer of `generate` and `chat` without --max-tokens."""

_WRITTEN: dict[str, tuple[Any, Any]] = {
    "max_tokens": (int | None, _LIMIT),
    "repetition_detection": (bool | None, None),
    "stop": (list[str] | None, None),
    "json_schema": (str | None, None),
    "logit_bias": (list[Any] | None, _bias),
    "template_kwargs": (dict[str, Any] | None, json_object),
}
"""Option -> its type and parser, where they differ on the command line."""

_NOTES = {
    "max_tokens": f"; -1: until the context is full; default: {MAX_TOKENS}",
    "repetition_detection": "; default: unless --ignore-eos",
    **dict.fromkeys(("stop", "logit_bias"), "; may be repeated"),
}
"""Option -> additional text of its help."""


def parser_of(name: str) -> Callable[[str], Any] | None:
    """Return the parser of an option's text, or None if the text is the value."""
    values = OPTIONS[name].values
    number = values if isinstance(values, Range) else None
    return _WRITTEN[name][1] if name in _WRITTEN else number


def answer_option(name: str, **more: Any) -> Any:
    """Declare an option of an answer; `more` replaces arguments of typer's `Option`."""
    about = OPTIONS[name].about
    return _option(name, about, parser_of(name), help=about.help + _NOTES.get(name, ""), **more)


def _option(name: str, about: About, parser: Any = None, **more: Any) -> Any:
    given = {
        "parser": parser,
        "help": about.help,
        "metavar": about.metavar,
        "rich_help_panel": about.panel,
        "autocompletion": complete.drafters if name == "drafter" else None,
    }
    words = about.words or f"--{name.replace('_', '-')}"
    return Option(*words.split(), **given | more)


def parameter(one: Parameter) -> Parameter:
    """Return a parameter for the command line.

    It is declared by an option of typer, or by an `About`, after its range, if any.
    """
    *parser, about = getattr(one.annotation, "__metadata__", [None])
    if not isinstance(about, About):
        return one
    kind, option = one.annotation.__origin__, _option(one.name, about, *parser)
    if kind == Sequence[str]:
        option.default_factory, option.show_default = list, False
        return one.replace(annotation=Annotated[list[str], option], default=Parameter.empty)
    return one.replace(annotation=Annotated[kind, option])


def answer_parameters() -> Iterator[Parameter]:
    """Yield the command line's parameter for each option of an answer; None: not given."""
    for name, option in OPTIONS.items():
        if option.about.panel:
            kind, _ = _WRITTEN.get(name, (option.type, None))
            kind, default = (bool, False) if kind is bool else (kind | None, None)
            annotation = Annotated[kind, answer_option(name)]  # type: ignore[valid-type]
            yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
