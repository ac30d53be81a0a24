"""`paceline coreml`: checks of Core ML models."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from paceline.cli import declare
from paceline.cli.console import print_report, progress_of
from paceline.cli.options import ComputeUnits, Output, command, group
from paceline.errors import InvalidRequest
from paceline.options import FloatRange, IntRange
from paceline_coreml.cli.arguments import Artifact, check_tools, open_artifact
from paceline_coreml.options import ConversionOptions, Stateless, Weights

app = group("Check Core ML models.")


@command(app)
def lint(*, artifact: Artifact, output: Output) -> int:
    """List operations that would leave the Neural Engine, or fail on it."""
    from paceline_coreml.lint import report

    path = Path(artifact)
    folder = path if path.suffix == ".mlpackage" else open_artifact(artifact).folder
    return print_report(report(folder), output)


@command(app)
def golden(
    *,
    artifact: Artifact,
    source: Annotated[
        str | None, Option(help="model it was converted from; default: from its manifest")
    ] = None,
    tokens: Annotated[int, declare.count(help="length of the test text, in tokens")] = 32,
    max_divergence: Annotated[
        float | None,
        Option(parser=FloatRange(0, 1000), help="fail if compressed weights diverge more, in nats"),
    ] = None,
    rounding: Annotated[
        Literal["f16", "engine"],
        Option(help="numerics of the emulator, off a Mac; engine: as on the Neural Engine"),
    ] = "f16",
    temporary: Annotated[
        Path | None, declare.folder(help="folder for downloads, and a copy of the weights")
    ] = None,
    output: Output,
) -> int:
    """Compare a model with itself and with transformers."""
    check_tools(temporary)
    from paceline.models import read_manifest
    from paceline_coreml.conversion.scratch import scratch
    from paceline_coreml.conversion.source import open_source
    from paceline_coreml.golden import report

    progress = progress_of(output)
    folder = open_artifact(artifact).folder
    made_from = read_manifest(folder).source
    origin = source or made_from.get("from", "")
    with scratch(temporary) as work:
        opened = open_source(origin, work, progress, made_from.get("target"))
        compared = report(
            folder,
            opened.checkpoint,
            target=opened.target,
            rounding=rounding,
            tokens=tokens,
            max_divergence=max_divergence,
            progress=progress,
        )
    return print_report(compared, output)


@command(app)
def probe(
    *,
    model: Annotated[
        str | None, Argument(help="model name, path, or Hugging Face owner/name")
    ] = None,
    shape: Annotated[
        str | None,
        Option(metavar="KEY=N,...", help="probe random weights instead: d,heads,kv,dh,ff,T,S"),
    ] = None,
    layer: Annotated[int, Option(parser=IntRange(0), help="layer to probe, from 0")] = 0,
    rows: Annotated[int | None, declare.count(help="rows per forward pass; default: 8")] = None,
    slots: Annotated[
        int | None, declare.count(help="context length; default: 2048, or the model's own")
    ] = None,
    weights: Weights = "int8",
    stateless: Stateless = False,
    units: Annotated[ComputeUnits, Option(help="compute units")] = "cpu-and-ne",
    temporary: Annotated[Path | None, declare.folder(help="folder for building packages")] = None,
    output: Output,
) -> int:
    """Convert and check one layer, before converting a whole model."""
    if shape is not None and (rows, slots, layer) != (None, None, 0):
        raise InvalidRequest("--shape has its own T and S; remove --rows, --slots and --layer")
    check_tools(temporary)
    from paceline_coreml.conversion.convert import open_model
    from paceline_coreml.conversion.scratch import scratch
    from paceline_coreml.conversion.source import open_source
    from paceline_coreml.probe import ProbeOptions, parse_shape, probe_layer, probe_shape

    progress = progress_of(output)
    probing = ProbeOptions(progress, units)
    functions = (rows,) if rows and stateless else None
    recipe = ConversionOptions(weights, rows, functions, stateless=stateless, slots=slots)
    if model is None and shape is not None:
        with scratch(temporary):
            return print_report(probe_shape(parse_shape(shape), recipe, probing), output)
    if model is None or shape is not None:
        raise InvalidRequest("probe needs either a model or --shape; pass one of the two")
    with scratch(temporary) as work:
        source = open_source(model, work, progress)
        opened = open_model(source, recipe)
        probed = probe_layer(source, opened, layer, opened.options.rows, probing)
    return print_report(probed, output)


@command(app)
def residency(
    *,
    artifact: Artifact,
    units: Annotated[ComputeUnits, Option(help="compute units")] = "cpu-and-ne",
    recorded: Annotated[Path | None, declare.file(help="evaluate a plan recorded on a Mac")] = None,
    record: Annotated[Path | None, declare.file(help="write the plan to a file")] = None,
    output: Output,
) -> int:
    """Show which device runs each operation on a Mac."""
    from paceline_coreml.residency import report

    folder = open_artifact(artifact).folder
    progress = progress_of(output)
    return print_report(
        report(folder, units=units, recorded=recorded, record=record, progress=progress), output
    )
