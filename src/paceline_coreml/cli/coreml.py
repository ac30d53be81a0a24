"""`paceline coreml`: checks of Core ML models."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from paceline.cli import declare, numbers
from paceline.cli.console import print_report, progress_of
from paceline.cli.options import ComputeUnits, Output, command, group

app = group("Check Core ML models.")

Artifact = Annotated[str, Argument(help="a folder that convert made, or NAME@coreml")]


@command(app)
def lint(*, artifact: Artifact, output: Output) -> int:
    """Name what would leave the Neural Engine, or fail there."""
    from paceline_coreml import commands

    return print_report(commands.lint(artifact), output)


@command(app)
def golden(
    *,
    artifact: Artifact,
    source: Annotated[
        str | None, Option(help="what it was made from; default: as in its manifest")
    ] = None,
    tokens: Annotated[int, declare.count(help="length of the text")] = 32,
    threshold: Annotated[
        float, Option(parser=numbers.PROBABILITY, help="minimum cosine similarity")
    ] = 0.99,
    rounding: Annotated[
        Literal["f16", "f32", "engine"],
        Option(help="numerics of the rehearsal, off a Mac: engine is as the Neural Engine's"),
    ] = "f16",
    temporary: Annotated[Path | None, declare.folder(help="where the source is fetched to")] = None,
    output: Output,
) -> int:
    """Compare a model with itself and with transformers."""
    from paceline_coreml import commands

    report = commands.golden(
        artifact,
        source=source,
        tokens=tokens,
        threshold=threshold,
        rounding=rounding,
        temporary=temporary,
        progress=progress_of(output),
    )
    return print_report(report, output)


@command(app)
def probe(
    *,
    model: Annotated[
        str | None, Argument(help="a model: a name, a path, a hub name (owner/name)")
    ] = None,
    shape: Annotated[
        str | None,
        Option(metavar="KEY=N,...", help="a layer with random weights: d,heads,kv,dh,ff,T,S"),
    ] = None,
    layer: Annotated[int, Option(parser=numbers.Whole(0), help="the model's layer")] = 0,
    rows: Annotated[int | None, declare.count(help="rows of a call; default: 8")] = None,
    slots: Annotated[
        int | None, declare.count(help="context length; default: 2048, or the model's own")
    ] = None,
    weights: Literal["int8", "int4", "f16", "int8-per-tensor"] = "int8",
    stateless: Annotated[
        bool, Option("--stateless", help="keys and values as inputs and outputs")
    ] = False,
    units: Annotated[ComputeUnits, Option(help="compute units")] = "cpu-and-ne",
    temporary: Annotated[Path | None, declare.folder(help="where the package is made")] = None,
    output: Output,
) -> int:
    """Convert one layer and check it, before a whole model."""
    from paceline_coreml import commands

    report = commands.probe(
        model,
        shape=shape,
        layer=layer,
        rows=rows,
        slots=slots,
        weights=weights,
        stateless=stateless,
        units=units,
        temporary=temporary,
        progress=progress_of(output),
    )
    return print_report(report, output)


@command(app)
def residency(
    *,
    artifact: Artifact,
    units: Annotated[ComputeUnits, Option(help="compute units")] = "cpu-and-ne",
    recorded: Annotated[
        Path | None, declare.file(help="judge a plan that was recorded on a Mac")
    ] = None,
    record: Annotated[Path | None, declare.file(help="write the plan to a file")] = None,
    output: Output,
) -> int:
    """Show where its operations run, on a Mac."""
    from paceline_coreml import commands

    report = commands.residency(
        artifact, units=units, recorded=recorded, record=record, progress=progress_of(output)
    )
    return print_report(report, output)
