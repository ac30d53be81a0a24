"""`paceline convert --to coreml`."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from paceline.cli import declare
from paceline.cli.console import print_report, progress_of
from paceline.cli.options import Output, command
from paceline.options import IntRange
from paceline_coreml.cli.arguments import Stateless, Weights, check_tools, slots_of

if TYPE_CHECKING:
    from paceline_coreml.engine.artifact import Artifact


@dataclass(frozen=True, slots=True)
class ConversionArguments:
    """The fields of `ConversionOptions`; None where an option was not given."""

    rows: Annotated[int | None, declare.count(help="maximum rows per pass; default: 8")] = None
    functions: Annotated[
        Any | None,
        Option(
            parser=declare.IntList(declare.COUNT),
            metavar="T,T",
            help="create static functions for these numbers of rows; the largest is for prompts",
        ),
    ] = None
    flexible: Annotated[
        bool | None,
        Option("--flexible", help="create one function for up to --rows rows; default: 4"),
    ] = None
    stateless: Stateless = None
    slots: Annotated[
        int | None, declare.count(help="context length; default: 2048, or the model's own")
    ] = None
    topology: Annotated[str | None, Option(help="layers per package, such as 20+4+6+2")] = None
    megabytes: Annotated[
        int | None, declare.count(help="maximum MiB per package of layers; default: 1500")
    ] = None
    head_rows: Annotated[
        int | None, declare.count(help="maximum tokens per package of the head; default: 16384")
    ] = None
    taps: Annotated[
        Any | None,
        Option(
            parser=declare.IntList(IntRange(0), "all"),
            metavar="N,N",
            help="layers to tap, or all",
        ),
    ] = None
    routing: Annotated[
        str | None, Option(help="expert routing, if the family supports several: top-1 or soft")
    ] = None
    keep: Annotated[
        list[str] | None, Option(metavar="PATTERN", help="weights to keep in f16; repeatable")
    ] = None


@command(
    examples=(
        "paceline convert Qwen/Qwen3-0.6B --to coreml",
        "paceline convert smollm2-135m --to coreml --gate",
    ),
)
def convert(
    *,
    source: Annotated[str, Argument(help="model name, path, or Hugging Face owner/name")],
    to: Annotated[
        Literal["coreml"],
        Option(help="format; other engines run a GGUF file, or safetensors with --engine mlx"),
    ],
    weights: Weights = "int8",
    folder: Annotated[
        Path | None, declare.folder("--output", help="folder to create; default: in the cache")
    ] = None,
    target: Annotated[
        str | None,
        Option(metavar="MODEL", help="target model, if the source is a DFlash drafter"),
    ] = None,
    temporary: Annotated[Path | None, declare.folder(help="folder for building packages")] = None,
    gate: Annotated[
        bool, Option("--gate", help="probe single layers first; stop if a probe fails")
    ] = False,
    conversion: ConversionArguments,
    output: Output,
) -> int:
    """Convert a model for the engine coreml, once (needs the extra coreml)."""
    check_tools(temporary)
    from paceline.models import CORE_ML_SUFFIX, core_ml_folder
    from paceline.storage.files import megabytes
    from paceline.storage.report import Report
    from paceline_coreml.conversion.conversion_options import ConversionOptions
    from paceline_coreml.conversion.convert import convert as make
    from paceline_coreml.conversion.scratch import scratch
    from paceline_coreml.conversion.source import open_source
    from paceline_coreml.probe import ProbeOptions, run_gates

    progress = progress_of(output)
    given = {"weights": weights, **asdict(conversion)}
    options: dict[str, Any] = {
        name: tuple(value) if name == "keep" else value
        for name, value in given.items()
        if value is not None
    }
    ConversionOptions(**options)  # validated before any download
    made = folder or core_ml_folder(source)
    with scratch(temporary) as work:
        opened = open_source(source, work, progress, target)
        options["slots"] = slots_of(opened.name, opened.facts.context_length, conversion.slots)
        recipe = ConversionOptions(**options)
        gates: list[Report] = []
        if gate:
            probing = ProbeOptions(weights, progress, stateless=recipe.stateless)
            gates = run_gates(opened, recipe, probing)
        about = {"gates": [one.value for one in gates]} if gate else {}
        checked = "".join(f"{one.text}\n" for one in gates)
        if gates and not gates[-1].passed:
            value = {"name": opened.name, "folder": None, **about}
            text = f"{checked}nothing was converted"
            return print_report(Report(value, passed=False, text=text), output)
        artifact = make(opened, made, recipe, progress=progress)
    name = str(folder) if folder else opened.name + CORE_ML_SUFFIX
    packages = list(_packages(artifact))
    value = {
        "name": name,
        "folder": str(made),
        **{key: getattr(artifact, key) for key in ("family", "rows", "slots")},
        **{key: list(getattr(artifact, key)) for key in ("functions", "taps")},
        "packages": packages,
        **about,
    }
    use = f"--drafter dflash:{made}" if target else f"--model {shlex.quote(name)}"
    use = f"`paceline classify {shlex.quote(name)}`" if artifact.labels else use
    text = f"{checked}{source} is ready in {made}; use it with {use}"
    table = [(one["path"], one["holds"], megabytes(one["bytes"])) for one in packages]
    heads = ("package", "holds", "size")
    return print_report(Report(value, text=text, tables=[("packages", heads, table)]), output)


def _packages(artifact: "Artifact") -> Iterator[dict[str, Any]]:
    from paceline.storage.files import size_of

    parts = [(shard, "layer") for shard in artifact.layer_shards]
    parts += [(shard, "label" if artifact.labels else "token") for shard in artifact.head_shards]
    for shard, what in parts:
        one = shard.end - shard.start == 1
        holds = f"{what} {shard.start}" if one else f"{what}s {shard.start} to {shard.end - 1}"
        yield {"path": shard.path, "holds": holds, "bytes": size_of(artifact.folder / shard.path)}
