"""Options that several commands share, and how a command declares its options.

A command is a function whose parameters are `Annotated` with `typer.Option`: type, range and help
are in one place. A dataclass parameter is an option for each of its fields.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option, Typer
from typer.core import TyperCommand, TyperOption

from paceline.cli import complete, declare, numbers
from paceline.cli.groups import Group
from paceline.cli.habits import followed, habits
from paceline.errors import InvalidRequest
from paceline.storage.text import decode
from paceline.system.machine import NO_FOLDER

MODEL_VARIABLE = "PACELINE_MODEL"  # names the default model

MAX_TOKENS = 2048
"""Maximum tokens of an answer of `generate` and `chat` without --max-tokens."""

_MAC = ("compute_units",)
"""Options that help shows on macOS alone."""

_ABOVE_2 = re.compile(r"[3-9]|[1-9][0-9]+")
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def default_model() -> str:
    """The model of a command without --model: $PACELINE_MODEL, the settings file's, or the trial's.

    Raises InvalidRequest for a settings file that cannot be read.
    """
    from paceline.models import DEFAULT_MODEL  # late: its package imports numpy

    return os.environ.get(MODEL_VARIABLE) or _settings().get("model") or DEFAULT_MODEL


def settings_file() -> Path:
    """The user's settings: TOML, with `model = "NAME"`."""
    from platformdirs import user_config_path

    try:
        return user_config_path("paceline") / "config.toml"
    except RuntimeError:  # no home
        return NO_FOLDER


def _settings() -> dict[str, str]:
    """The settings in the user's file; none where there is no file."""
    import tomllib

    path = settings_file()
    if not os.access(path, os.F_OK):  # nor one in a home that this user may not enter
        return {}
    try:
        values = tomllib.loads(decode(path.read_bytes(), path))
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"{path} is not TOML: {error}") from error
    for name, value in values.items():
        if name != "model" or not isinstance(value, str):
            raise InvalidRequest(f'{path} has {name} = {value!r}; expected model = "NAME" alone')
    return values


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
    app: Typer, name: str | None = None, *, kind: "type[Command] | None" = None, **more: Any
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator: add a function to `app` as a command; a dataclass parameter becomes options.

    `kind` is its class, and `more` are attributes of it. --help shows the options `first`, by
    parameter, and --help-all all; without `first` both do. `examples` are command lines for --help,
    each with a comment after #. `needs` and `bars` have, by parameter, the options that have no
    effect without it, and beside it.
    """

    def add(function: Callable[..., int]) -> Callable[..., int]:
        app.command(name, cls=type("Command", (kind or Command,), more))(_flat(function))
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
    """A command that accepts four forms more than typer does.

    `--data A B` is `--data A --data B` where the metavar ends with an ellipsis. A negative number,
    or text with a space in it, is an argument even if it begins with a dash. A command with --model
    and no arguments takes the model by its place. Options of other programs are in `habits.py`.
    """

    first: Sequence[str] = ()
    examples: Sequence[str] = ()
    needs: Mapping[str, Collection[str]] = {}
    bars: Mapping[str, Collection[str]] = {}
    _shows_all = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = args if ctx.resilient_parsing else [*self._plain(ctx, args)]
        self._check(ctx, self.make_parser(ctx).parse_args([*words])[2])
        return super().parse_args(ctx, words)

    def _check(self, ctx: Any, options: Sequence[Any]) -> None:
        """Fail for an option that has no effect with the others."""
        words = {option.name: option.opts[-1] for option in self.get_params(ctx)}
        names = {option.name for option in options}
        for how, rules in (("without", self.needs), ("with", self.bars)):
            for other, without_effect in rules.items():
                if (other in names) == (how == "with") and (useless := names & {*without_effect}):
                    ctx.fail(f"argument {words[min(useless)]}: has no effect {how} {words[other]}")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, in a section for each panel."""
        short = bool(self.first) and not self._shows_all
        sections: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self._shown(ctx, short=short):
            panel = None if short else getattr(parameter, "rich_help_panel", None)
            title = panel or f"{parameter.param_type_name}s".title()
            if record := parameter.get_help_record(ctx):
                name = re.sub(r"<list\[(.*)\]>", r"<\1>", record[0])
                sections.setdefault(title, []).append((name, record[1]))
        if short:
            sections["Options"].append(("--help-all", "all options"))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.examples:
            with formatter.section("Examples"):
                lines = [example.partition("  # ") for example in self.examples]
                width = max(len(line) for line, _, _ in lines)
                for line, mark, about in lines:
                    indent = " " * formatter.current_indent
                    formatter.write(f"{indent}{f'{line:<{width}}{mark}{about}'.rstrip()}\n")

    def _shown(self, ctx: Any, *, short: bool) -> Iterator[Any]:
        """The parameters that help shows: in a short one, `first` in its order."""
        parameters = self.get_params(ctx)
        if short:
            names = {parameter.name: parameter for parameter in parameters}
            yield from (one for one in parameters if one.param_type_name == "argument")
            yield from (names[name] for name in self.first)
        for parameter in () if short else parameters:
            if sys.platform == "darwin" or parameter.name not in _MAC:
                yield parameter

    def _plain(self, ctx: Any, words: list[str]) -> Iterator[str]:
        """The options and their values, then `--` and all arguments."""
        options = [known for known in self.get_params(ctx) if isinstance(known, TyperOption)]
        names = {name for known in options for name in (*known.opts, *known.secondary_opts)}
        taking = {name for known in options if not known.is_flag for name in known.opts}
        dotted = [known for known in options if (known.metavar or "").endswith("...")]
        many = {name for known in dotted for name in known.opts}
        arguments: list[str] = []
        last, value_follows, model_missing = "", False, self._takes_model(ctx)
        for number, given in enumerate(words):
            word = given if value_follows else followed(given, names, ctx.fail)
            option = word.partition("=")[0]
            if value_follows:
                if option in names:
                    ctx.fail(f"argument {last}: expected a value before {option}")
                if (answer := habits("numbers").get(last)) and _ABOVE_2.fullmatch(word):
                    ctx.fail(f"argument {last}: {answer}")
                yield word
                value_follows = False
            elif word == "--help-all":
                self._shows_all = True
                print(self.get_help(ctx))
                ctx.exit()
            elif word == "--":
                arguments += words[number + 1 :]
                break
            elif word[:1] == "-" != word and not (
                " " in option or _NEGATIVE_NUMBER.fullmatch(word)
            ):
                last, *words[number + 1 : number + 1] = _parts(word, taking, ctx.fail)
                yield last
                value_follows = last in taking
            elif last in many:
                yield from (last, word)
            elif model_missing:
                model_missing = False
                yield from ("--model", word)
            else:
                arguments.append(word)
        if value_follows:
            ctx.fail(f"argument {last}: expected a value")
        if arguments:
            yield from ("--", *arguments)

    def _takes_model(self, ctx: Any) -> bool:
        """Return whether the command takes a model by its place."""
        parameters = {one.name: one.param_type_name for one in self.get_params(ctx)}
        return "model" in parameters and "argument" not in parameters.values()

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the line that shows how the command is used."""
        return [*super().collect_usage_pieces(ctx), *["[model]"] * self._takes_model(ctx)]


def _parts(word: str, taking: Collection[str], fail: Callable[[str], object]) -> list[str]:
    """Return an option, or a letter and its value, as in -n200 and -n=200, but not in -st."""
    letter, value = word[:2], word[2:]
    if letter == "--" or not value:
        return [word]
    if letter not in taking or value[0] not in "=-.0123456789":
        fail(f"no option is called {word.partition('=')[0]}")
    return [letter, value.removeprefix("=")]


Quiet = Annotated[bool, Option("-q", "--quiet", help="only the result: no progress, no notes")]


@dataclass(frozen=True, slots=True)
class Output:
    """How a command prints what it found."""

    json: Annotated[bool, Option("--json", help="print JSON")] = False
    quiet: Quiet = False


ComputeUnits = Literal["all", "cpu-only", "cpu-and-gpu", "cpu-and-ne"]
"""As in `paceline.engines.base`, which imports numpy."""

_model = partial(Option, rich_help_panel="Model")

Revision = Annotated[
    str | None, _model(metavar="REV", help="branch, tag or commit of a model on the hub")
]
Offline = Annotated[
    bool, _model("--offline", help="fetch nothing; as with HF_HUB_OFFLINE=1 and PIP_NO_INDEX=1")
]


ModelName = Annotated[
    str,
    _model(
        "-m",
        "--model",
        default_factory=default_model,
        show_default=False,
        autocompletion=complete.models,
        help="name, path or hub name; `paceline models` lists them; default: $PACELINE_MODEL, or a "
        "small one to try",
    ),
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, and how it is run."""

    model: ModelName
    revision: Revision = None
    offline: Offline = False
    engine: Annotated[
        str, _model(autocompletion=complete.engines, help="auto, llamacpp, mlx or coreml")
    ] = "auto"
    rows: Annotated[
        int,
        _model(
            parser=numbers.WholeParser(1, 2),
            help="fewest tokens that a call computes, with a copy of one if needed: 2 is exact, 1 "
            "is not",
        ),
    ] = 2
    cache_tokens: Annotated[
        int | None,
        _model(parser=numbers.COUNT, help="KV cache, in tokens; default: one context, for serve 4"),
    ] = None
    threads: Annotated[
        int | None,
        _model(parser=numbers.THREADS, help="CPU threads: auto, or at most one per CPU"),
    ] = None
    device: Annotated[
        str, _model(help="for GGUF files: auto, cpu, gpu, or a device that `paceline plan` names")
    ] = "auto"
    kv: Annotated[
        Literal["q8_0"] | None,
        _model(help="q8_0: keys and values in half the memory; default: f16"),
    ] = None
    compute_units: Annotated[
        ComputeUnits | None, _model(help="for the engine coreml; default: cpu-and-ne")
    ] = None


ModelArgument = Annotated[
    str,
    Argument(
        default_factory=default_model,
        show_default=False,
        autocompletion=complete.models,
        help="name, path or hub name; default: $PACELINE_MODEL, or a small one to try",
    ),
]

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
Served = Annotated[
    str | None, Option(metavar="NAME", help="model of the server; needed if it has several")
]
Suite = Annotated[
    Path | None,
    declare.file(
        help="JSON lines, Spec-Bench's question.jsonl too; default: paceline's own prompts"
    ),
]
ResultFile = Annotated[Path | None, declare.file("--output", help="also write the result as JSON")]
