"""Options that several commands share, and how a command declares its options.

A command is a function whose parameters are `Annotated` with `typer.Option`: type, range and help
are in one place. A dataclass parameter is an option for each of its fields.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option, Typer
from typer.core import TyperCommand, TyperOption

from paceline.cli import declare, numbers
from paceline.cli.groups import Group

MAX_TOKENS = 2048
"""Maximum tokens of an answer of `generate` and `chat` without --max-tokens."""

_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def default_model() -> str:
    """The model of a command without --model. Imported late: its package imports numpy."""
    from paceline.models import DEFAULT_MODEL

    return DEFAULT_MODEL


def group(about: str | None = None) -> Typer:
    """A family of commands, or the place of one command."""
    return Typer(
        cls=Group,
        help=about,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def command(
    app: Typer, name: str | None = None, *, kind: "type[Command] | None" = None
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator: add a function to `app` as a command; a dataclass parameter becomes options."""

    def add(function: Callable[..., int]) -> Callable[..., int]:
        app.command(name, cls=kind or Command)(_flat(function))
        return function

    return add


def _flat(function: Callable[..., int]) -> Callable[..., int]:
    """`function` with a parameter for each field of its dataclass parameters."""
    groups: dict[str, type] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if is_dataclass(parameter.annotation) and isinstance(parameter.annotation, type):
            groups[name] = parameter.annotation
            parameters += map(_parameter, fields(parameter.annotation))
        else:
            parameters.append(parameter)

    @wraps(function)
    def call(**values: Any) -> int:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return function(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _parameter(field: Any) -> Parameter:
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=field.type)


class Command(TyperCommand):
    """A command that accepts two forms more than typer does.

    `--data A B` is `--data A --data B` where the metavar ends with an ellipsis. A negative number,
    or text with a space in it, is an argument even if it begins with a dash.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See the class."""
        words = args if ctx.resilient_parsing else [*self._plain(ctx, args)]
        return super().parse_args(ctx, words)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, in a section for each panel."""
        sections: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            title = (
                getattr(parameter, "rich_help_panel", None)
                or f"{parameter.param_type_name}s".title()
            )
            if record := parameter.get_help_record(ctx):
                name = re.sub(r"<list\[(.*)\]>", r"<\1>", record[0])
                sections.setdefault(title, []).append((name, record[1]))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def _plain(self, ctx: Any, words: Sequence[str]) -> Iterator[str]:
        """The options and their values, then `--` and all arguments."""
        options = [known for known in self.get_params(ctx) if isinstance(known, TyperOption)]
        names = {name for known in options for name in (*known.opts, *known.secondary_opts)}
        taking = {name for known in options if not known.is_flag for name in known.opts}
        many = {
            name
            for known in options
            if (known.metavar or "").endswith("...")
            for name in known.opts
        }
        arguments: list[str] = []
        last, value_follows = "", False
        for number, word in enumerate(words):
            option = word.partition("=")[0]
            if value_follows:
                if option in names:
                    ctx.fail(f"argument {last}: expected a value before {option}")
                yield word
                value_follows = False
            elif word == "--":
                arguments += words[number + 1 :]
                break
            elif word[:1] == "-" != word and not (
                " " in option or _NEGATIVE_NUMBER.fullmatch(word)
            ):
                yield word
                last, value_follows = word, word in taking
            elif last in many:
                yield from (last, word)
            else:
                arguments.append(word)
        if value_follows:
            ctx.fail(f"argument {last}: expected a value")
        if arguments:
            yield from ("--", *arguments)


@dataclass(frozen=True, slots=True)
class Output:
    """How a command prints what it found."""

    json: Annotated[bool, Option("--json", help="print JSON")] = False
    quiet: Annotated[bool, Option("--quiet", help="no progress, no statistics")] = False


ComputeUnits = Literal["all", "cpu-only", "cpu-and-gpu", "cpu-and-ne"]
"""As in `paceline.engines.base`, which imports numpy."""

_model = partial(Option, rich_help_panel="Model")

Revision = Annotated[
    str | None, _model(metavar="REV", help="branch, tag or commit of a model on the hub")
]
Offline = Annotated[
    bool, _model("--offline", help="fetch nothing; as with HF_HUB_OFFLINE=1 and PIP_NO_INDEX=1")
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, and how it is run."""

    model: Annotated[
        str,
        _model(default_factory=default_model, show_default=False, help="name, path or hub name"),
    ]
    weights: Annotated[
        str | None,
        _model(help="int8, of a checkpoint also int4 or f16; default: a GGUF file's own, or int8"),
    ] = None
    revision: Revision = None
    offline: Offline = False
    engine: Annotated[str, _model(help="auto, openvino, llamacpp, coreml or mlx")] = "auto"
    rows: Annotated[
        int, _model(parser=numbers.Whole(1, 2), help="minimum rows of a call: 2 is exact, 1 is not")
    ] = 2
    cache_tokens: Annotated[
        int | None,
        _model(parser=numbers.COUNT, help="KV cache, in tokens; default: one context, for serve 4"),
    ] = None
    threads: Annotated[int | None, _model(parser=numbers.THREADS)] = None
    compute_units: Annotated[
        ComputeUnits | None, _model(help="for the engine coreml; default: cpu-and-ne")
    ] = None


SAMPLING = "Sampling (default: as the model has it)"
GenerationConfig = Annotated[
    Literal["auto", "none"],
    Option(
        help="none: ignore the sampling settings that the model comes with",
        rich_help_panel=SAMPLING,
    ),
]

MaxTokens = Annotated[int, declare.count(help="maximum tokens of an answer")]
Seed = Annotated[int, Option(parser=numbers.SEED, help="the same seed gives the same tokens")]
ApiKey = Annotated[
    str | None,
    Option(help="API key of the server that is asked; default, on this machine: $PACELINE_API_KEY"),
]
Suite = Annotated[
    Path | None,
    declare.file(
        help="JSON lines, Spec-Bench's question.jsonl too; default: paceline's own prompts"
    ),
]
ResultFile = Annotated[Path | None, declare.file("--output", help="also write the result as JSON")]
