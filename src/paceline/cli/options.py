"""Options that several commands share, and how a command declares its options.

A command is a function whose parameters are `Annotated` with `typer.Option`: type, range and help
are in one place. A dataclass parameter becomes an option per field.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option, Typer
from typer.core import TyperCommand, TyperOption

from paceline.cli import complete, declare
from paceline.cli.groups import Group
from paceline.cli.habits import with_habits
from paceline.errors import InvalidRequest
from paceline.options import COUNT, About, IntRange, Options
from paceline.storage.text import decode
from paceline.system.machine import NO_FOLDER

MODEL_VARIABLE = "PACELINE_MODEL"  # names the default model


def default_model() -> str:
    """Return the default of --model: $PACELINE_MODEL, the settings' model, or the demo model.

    Raises InvalidRequest for a settings file that cannot be read.
    """
    from paceline.models import DEFAULT_MODEL  # late: its package imports numpy

    return os.environ.get(MODEL_VARIABLE) or _settings().get("model") or DEFAULT_MODEL


def settings_file() -> Path:
    """Return the path of the user's settings: TOML, with `model = "NAME"`."""
    from platformdirs import user_config_path

    try:
        return user_config_path("paceline") / "config.toml"
    except RuntimeError:  # no home
        return NO_FOLDER


def _settings() -> dict[str, str]:
    """Return the settings in the user's file; empty without a file."""
    import tomllib

    path = settings_file()
    if not os.access(path, os.F_OK):  # also for a home folder that this user may not enter
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
    """Return a new group of commands, or a Typer app for one command."""
    return Typer(
        cls=Group,
        help=about,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def command(
    app: Typer | None = None, *, kind: "type[Command] | None" = None, **more: Any
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate a function as a command; a dataclass parameter becomes options.

    The command is added to `app`, by default to a new one, which becomes the function's attribute
    `app`. `kind` is its class, and `more` are attributes of it. --help shows the options `first`,
    by parameter, and --help-all all; without `first` both do. `examples` are command lines for
    --help, each with a comment after #.
    """

    def add(function: Callable[..., int]) -> Callable[..., int]:
        own = app or group()
        own.command(cls=type("Command", (kind or Command,), more))(_flat(function))
        function.app = own  # type: ignore[attr-defined]
        return function

    return add


def _flat(function: Callable[..., int]) -> Callable[..., int]:
    """Return `function` with the parameters that `_parameters` returns for its own."""
    own = inspect.signature(function).parameters.values()

    @wraps(function)
    def call(**values: Any) -> int:
        return function(**{one.name: _value(one, values) for one in own})

    parameters = [parameter for one in own for parameter in _parameters(one)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _parameters(one: Parameter) -> list[Parameter]:
    """Return the command line's parameters: of a dataclass its fields', of `Options` the options.

    A field without a declaration has none.
    """
    if one.annotation is Options:
        return [*declare.answer_parameters()]
    if is_dataclass(one.annotation):
        return [part for field in _fields(one.annotation) for part in _parameters(field)]
    return [declare.parameter(one)]


def _fields(kind: Any) -> Iterator[Parameter]:
    for field in fields(kind):
        if field.type is Options or hasattr(field.type, "__metadata__"):
            default = Parameter.empty if field.default is MISSING else field.default
            yield Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=default, annotation=field.type
            )


def _value(one: Parameter, given: Mapping[str, Any]) -> Any:
    """Return a parameter's value, from those of the command line's parameters."""
    if one.annotation is Options:
        return {option.name: given[option.name] for option in _parameters(one)}
    if not is_dataclass(one.annotation):
        return given[one.name]
    kind: Any = one.annotation
    return kind(**{field.name: _value(field, given) for field in _fields(kind)})


class Command(TyperCommand):
    """A command with a short help that accepts options of other programs (`habits.py`).

    A command with --model and no arguments also takes the model as a positional argument.
    """

    first: Sequence[str] = ()
    examples: Sequence[str] = ()
    _shows_all = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--help-all" in args:
            self._shows_all, args = True, ["--help"]
        if not ctx.resilient_parsing:
            args = with_habits(args, self._options(ctx), ctx.fail)
        ctx.allow_extra_args = takes_model = self._takes_model(ctx)
        left = super().parse_args(ctx, args)
        if takes_model and left:
            ctx.params["model"], *left = left
            if left:
                ctx.fail(f"Got unexpected extra argument(s) ({' '.join(left)})")
        return left

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options: those of `first`, or with --help-all a section for each panel."""
        parameters = {one.name: one for one in self.get_params(ctx)}
        short = [] if self._shows_all else [parameters[name] for name in self.first]
        arguments = [one for one in parameters.values() if one.param_type_name == "argument"]
        sections: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in [*arguments, *short] if short else parameters.values():
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
                for example in self.examples:
                    formatter.write(f"{' ' * formatter.current_indent}{example}\n")

    def _options(self, ctx: Any) -> dict[str, bool]:
        """Return option -> whether a value follows it."""
        return {
            name: not one.is_flag
            for one in self.get_params(ctx)
            if isinstance(one, TyperOption)
            for name in (*one.opts, *one.secondary_opts)
        }

    def _takes_model(self, ctx: Any) -> bool:
        """Return whether the command takes a model as a positional argument."""
        parameters = {one.name: one.param_type_name for one in self.get_params(ctx)}
        return "model" in parameters and "argument" not in parameters.values()

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), *["[model]"] * self._takes_model(ctx)]


Quiet = Annotated[
    bool, Option("-q", "--quiet", help="print only the result, without progress and notices")
]


@dataclass(frozen=True, slots=True)
class Output:
    json: Annotated[bool, Option("--json", help="print JSON")] = False
    quiet: Quiet = False


ComputeUnits = Literal["all", "cpu-only", "cpu-and-gpu", "cpu-and-ne"]
"""The same as in `paceline.engines.base`, which imports numpy."""

_model, _about = partial(Option, rich_help_panel="Model"), partial(About, "Model")

Revision = Annotated[
    str | None,
    _model(metavar="REV", help="branch, tag or commit of a model on the Hugging Face Hub"),
]
Offline = Annotated[
    bool, _model("--offline", help="download nothing; same as HF_HUB_OFFLINE=1 and PIP_NO_INDEX=1")
]

_NAME: Any = {
    "default_factory": default_model,
    "show_default": False,
    "autocompletion": complete.models,
    "help": "name, path, or Hugging Face Hub name; `paceline models` lists them; default: "
    "$PACELINE_MODEL, or a "
    "small one to try",
}
ModelName = Annotated[str, _model("-m", "--model", **_NAME)]
ModelArgument = Annotated[str, Argument(**_NAME)]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    model: ModelName
    revision: Revision = None
    offline: Offline = False
    engine: Annotated[
        str, _model(autocompletion=complete.engines, help="auto, llamacpp, mlx or coreml")
    ] = "auto"
    min_rows: Annotated[
        int,
        IntRange(1, 2),
        _about("minimum tokens per forward pass, padded if necessary: 2 is exact, 1 is not"),
    ] = 2
    cache_tokens: Annotated[
        int | None,
        COUNT,
        _about("size of the KV cache, in tokens; default: one full context, for serve four"),
    ] = None
    threads: Annotated[
        int | None, declare.THREADS, _about("CPU threads: auto, or at most one per CPU")
    ] = None
    device: Annotated[
        str, _model(help="for GGUF files: auto, cpu, gpu, or a device that `paceline plan` names")
    ] = "auto"
    kv_cache_type: Annotated[
        Literal["q8_0"] | None,
        _model(help="type of keys and values; q8_0 halves their memory; default: f16"),
    ] = None
    compute_units: Annotated[
        ComputeUnits | None, _model(help="devices for Core ML; default: cpu-and-ne")
    ] = None


GenerationConfig = Annotated[Literal["auto", "none"], declare.answer_option("generation_config")]
MaxTokens = Annotated[int, declare.count(help="maximum tokens of an answer")]
Seed = Annotated[int, declare.answer_option("seed", rich_help_panel=None)]
ApiKey = Annotated[
    str | None,
    Option(help="API key of the server; default for a local one: $PACELINE_API_KEY"),
]
Served = Annotated[
    str | None, Option(metavar="NAME", help="model of the server; needed if it has several")
]
Suite = Annotated[
    Path | None,
    declare.file(
        help="JSON lines, such as Spec-Bench's question.jsonl; default: paceline's own prompts"
    ),
]
ResultFile = Annotated[Path | None, declare.file("--output", help="also write the result as JSON")]
