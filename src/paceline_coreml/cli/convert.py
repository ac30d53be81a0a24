"""`paceline convert --to coreml`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from paceline.cli import declare, numbers
from paceline.cli.console import print_report, progress_of
from paceline.cli.convert import Folder
from paceline.cli.options import Output, command, group

app = group()


@dataclass(frozen=True, slots=True)
class ConversionArguments:
    """Fields of `ConversionOptions`; None where an option was not given."""

    rows: Annotated[int | None, declare.count(help="maximum rows of a call; default: 8")] = None
    functions: Annotated[
        Any | None,
        Option(
            parser=numbers.Wholes(numbers.COUNT),
            metavar="T,T",
            help="static functions for these numbers of rows; the most are for prompts",
        ),
    ] = None
    flexible: Annotated[
        bool | None, Option("--flexible", help="one function for 1 to 4 rows, or to --rows")
    ] = None
    stateless: Annotated[
        bool | None, Option("--stateless", help="keys and values as inputs and outputs")
    ] = None
    slots: Annotated[
        int | None, declare.count(help="context length; default: 2048, or the model's own")
    ] = None
    topology: Annotated[str | None, Option(help="layers of each package, such as 20+4+6+2")] = None
    megabytes: Annotated[
        int | None, declare.count(help="maximum size of a package of layers; default: 1500")
    ] = None
    head_rows: Annotated[
        int | None, declare.count(help="maximum tokens in a package of the head")
    ] = None
    taps: Annotated[
        Any | None,
        Option(
            parser=numbers.Wholes(numbers.Whole(0), "all"),
            metavar="N,N",
            help="layers to tap, or all",
        ),
    ] = None
    routing: Annotated[
        str | None, Option(help="routing of experts, where a family has a choice; see the guide")
    ] = None
    keep: Annotated[
        list[str] | None, Option(metavar="PATTERN", help="weights that stay f16; may be repeated")
    ] = None


@command(app)
def convert(
    *,
    source: Annotated[str, Argument(help="a model: a name, a path, a hub name (owner/name)")],
    to: Annotated[Literal["coreml"], Option(help="this form")] = "coreml",
    weights: Literal["int8", "int4", "f16", "int8-per-tensor"] = "int8",
    folder: Folder = None,
    temporary: Annotated[Path | None, declare.folder(help="where packages are made")] = None,
    gate: Annotated[
        bool, Option("--gate", help="probe single layers first; stop if one does not pass")
    ] = False,
    conversion: ConversionArguments,
    output: Output,
) -> int:
    """Convert a model for the engine coreml, once (needs the extra coreml)."""
    from paceline_coreml import commands

    options = {**asdict(conversion), "weights": weights}
    if conversion.keep is not None:
        options["keep"] = tuple(conversion.keep)
    report = commands.convert(
        source,
        options=options,
        output=folder,
        temporary=temporary,
        gate=gate,
        progress=progress_of(output),
    )
    return print_report(report, output)
