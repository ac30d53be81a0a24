"""`paceline convert --to coreml`."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from paceline.cli import declare
from paceline.cli.console import print_report, progress_of
from paceline.cli.options import Output, command
from paceline_coreml.cli.arguments import check_tools
from paceline_coreml.options import ConversionOptions

if TYPE_CHECKING:
    from paceline_coreml.engine.artifact import Artifact


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
    conversion: ConversionOptions,
    output: Output,
) -> int:
    """Convert a model for the engine coreml, once (needs the extra coreml)."""
    check_tools(temporary)
    from paceline.models import CORE_ML_SUFFIX, core_ml_folder
    from paceline.storage.files import megabytes
    from paceline.storage.report import Report
    from paceline_coreml.conversion.convert import convert as make
    from paceline_coreml.conversion.scratch import scratch
    from paceline_coreml.conversion.source import open_source
    from paceline_coreml.probe import ProbeOptions, run_gates

    progress = progress_of(output)
    made = folder or core_ml_folder(source)
    with scratch(temporary) as work:
        opened = open_source(source, work, progress, target)
        gates = run_gates(opened, conversion, ProbeOptions(progress)) if gate else []
        about = {"gates": [one.value for one in gates]} if gate else {}
        checked = "".join(f"{one.text}\n" for one in gates)
        if gates and not gates[-1].passed:
            value = {"name": opened.name, "folder": None, **about}
            text = f"{checked}nothing was converted"
            return print_report(Report(value, passed=False, text=text), output)
        artifact = make(opened, made, conversion, progress=progress)
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
