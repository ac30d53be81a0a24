"""How options are declared: those of an answer, from `paceline.options`, and common kinds."""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from paceline.cli import complete, numbers
from paceline.options import OPTIONS, Range

count = partial(Option, parser=numbers.COUNT)
file = partial(Option, parser=Path, metavar="FILE")
folder = partial(Option, parser=Path, metavar="FOLDER")
several = partial(Option, default_factory=list, show_default=False)
drafters = partial(several, "--drafter", autocompletion=complete.drafters)

MAX_TOKENS = 2048
"""Maximum tokens of an answer of `generate` and `chat` without --max-tokens."""

_WRITTEN: dict[str, tuple[Any, Any]] = {
    "max_tokens": (int | None, numbers.LIMIT),
    "repetition_detection": (bool | None, None),
    "stop": (list[str] | None, None),
    "json_schema": (str | None, None),
    "logit_bias": (list[Any] | None, numbers.bias),
    "template_kwargs": (dict[str, Any] | None, numbers.json_object),
}
"""Option -> its type and parser, where the command line has others."""

_NOTES = {
    "max_tokens": f"; -1: until the context is full; default: {MAX_TOKENS}",
    "repetition_detection": "; default: unless --ignore-eos",
    **dict.fromkeys(("stop", "logit_bias"), "; may be repeated"),
}
"""Option -> what its help says besides."""


def parser_of(name: str) -> Callable[[str], Any] | None:
    """Return what makes a value of a text for an option; None: its value is the text."""
    values = OPTIONS[name].values
    number = values if isinstance(values, Range) else None
    return _WRITTEN[name][1] if name in _WRITTEN else number


def of(name: str, **more: Any) -> Any:
    """Declare an option of an answer; `more` replaces arguments of typer's `Option`."""
    about = OPTIONS[name].about
    given = {
        "parser": parser_of(name),
        "help": about.help + _NOTES.get(name, ""),
        "metavar": about.metavar,
        "rich_help_panel": about.panel,
        "autocompletion": complete.drafters if name == "drafter" else None,
    }
    words = about.words or f"--{name.replace('_', '-')}"
    return Option(*words.split(), **given | more)


def answer_parameters() -> Iterator[Parameter]:
    """Yield the command line's parameter for each option of an answer; None: not given."""
    for name, option in OPTIONS.items():
        if option.about.panel:
            kind, _ = _WRITTEN.get(name, (option.type, None))
            kind, default = (bool, False) if kind is bool else (kind | None, None)
            annotation = Annotated[kind, of(name)]  # type: ignore[valid-type]
            yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
