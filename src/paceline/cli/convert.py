"""`paceline convert`."""

import shlex
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from paceline.cli import numbers
from paceline.cli.console import print_report, print_value, progress_of
from paceline.cli.options import Output, command, group
from paceline.errors import InvalidRequest

app = group()

_core_ml = partial(Option, rich_help_panel="Core ML")
_count = partial(_core_ml, parser=numbers.COUNT)


@dataclass(frozen=True, slots=True)
class CoreMlOptions:
    """Options that only Core ML has: None where they were not given."""

    rows: Annotated[int | None, _count(help="maximum rows of a call; default: 4")] = None
    functions: Annotated[
        Any | None,
        _core_ml(
            parser=numbers.Wholes(numbers.COUNT),
            metavar="T,T",
            help="static functions for these numbers of rows",
        ),
    ] = None
    slots: Annotated[
        int | None, _count(help="context length; default: 2048, or the model's own")
    ] = None
    topology: Annotated[str | None, _core_ml(help="layers of each package, such as 20+4+6+2")] = (
        None
    )
    megabytes: Annotated[
        int | None, _count(help="maximum size of a package of layers; default: 1500")
    ] = None
    head_rows: Annotated[int | None, _count(help="maximum tokens in a package of the head")] = None
    taps: Annotated[
        Any | None,
        _core_ml(
            parser=numbers.Wholes(numbers.Whole(0), "all"),
            metavar="N,N",
            help="layers to tap, or all",
        ),
    ] = None
    routing: Annotated[
        str | None, _core_ml(help="routing of experts, where a family has a choice; see the guide")
    ] = None
    keep: Annotated[
        list[str] | None, _core_ml(metavar="PATTERN", help="weights that stay f16; may be repeated")
    ] = None
    temporary: Annotated[
        Path | None, _core_ml(parser=Path, metavar="FOLDER", help="where packages are made")
    ] = None


@command(
    app,
    examples=(
        "paceline convert Qwen/Qwen3-0.6B --weights int4",
        "paceline convert ./checkpoint --weights int8",
    ),
)
def convert(
    *,
    source: Annotated[
        str, Argument(help="a folder, a hub name (owner/name); for Core ML any model")
    ],
    to: Literal["openvino", "coreml"] = "openvino",
    weights: Literal["int8", "int4", "f16", "int8-per-tensor"] = "int8",
    folder: Annotated[
        Path | None,
        Option(
            "--output", parser=Path, metavar="FOLDER", help="a folder to make; default: the cache"
        ),
    ] = None,
    core_ml: CoreMlOptions,
    output: Output,
) -> int:
    """Convert a model to another form, once."""
    chosen = {name: value for name, value in asdict(core_ml).items() if value is not None}
    if to == "coreml":
        from paceline.tools.coreml import commands

        options = {**asdict(core_ml), "weights": weights}
        del options["temporary"]
        if core_ml.keep is not None:
            options["keep"] = tuple(core_ml.keep)
        report = commands.convert(
            source,
            options=options,
            output=folder,
            temporary=core_ml.temporary,
            progress=progress_of(output),
        )
        return print_report(report, output)
    if chosen:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in chosen)
        raise InvalidRequest(f"{names}: only with --to coreml")
    from paceline.models import convert as export

    files = export(source, weights, output=folder, progress=progress_of(output))
    facts = {"name": files.name, "folder": str(files.folder)}
    name = shlex.quote(str(folder) if folder is not None else f"{source}@{weights}")
    print_value(output, facts, f"{source} is ready in {files.folder}; use it with --model {name}")
    return 0
