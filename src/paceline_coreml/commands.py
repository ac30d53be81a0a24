"""The commands about Core ML: plain arguments in, a report out.

torch and coremltools are imported only by the commands that need them.
"""

import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidRequest, MissingExtra
from paceline.models import CORE_ML_SUFFIX, Progress, core_ml_folder, read_manifest, resolve
from paceline.storage.files import megabytes, size_of
from paceline.storage.report import Report
from paceline_coreml.engine.artifact import Artifact, Shard
from paceline_coreml.engine.packages import DEFAULT_UNITS

if TYPE_CHECKING:
    from paceline_coreml.conversion.source import Source

_SLOTS = 2048
"""Default of the longest text, at most the model's context length."""


def convert(
    name: str,
    *,
    options: Mapping[str, Any],
    output: Path | None,
    temporary: Path | None,
    gate: bool,
    progress: Progress,
) -> Report:
    """Convert a model to Core ML, or resume an interrupted conversion.

    Args:
        name: see `models.open_origin`.
        options: fields of `ConversionOptions`; None is the default.
        output: the folder to make; None: the cache, where `NAME@coreml` finds it.
        temporary: folder in which shards are built before they are moved; None: the system's.
        gate: first probe a layer of the model's shape, and its own; nothing is converted if one
            does not pass.
        progress: reports packages.

    Raises:
        MissingExtra: torch, transformers or coremltools is not installed.
        ModelNotFound: there is no such model.
        ModelError: it cannot be read, or its family or form is not supported.
        InvalidRequest: a value is out of range, or the folder cannot be used.
    """
    check_tools()
    from paceline_coreml.conversion.conversion_options import ConversionOptions
    from paceline_coreml.conversion.convert import convert as make
    from paceline_coreml.conversion.source import open_source
    from paceline_coreml.probe import ProbeOptions, run_gates

    _check_temporary(temporary)
    chosen = {key: value for key, value in options.items() if value is not None}
    ConversionOptions(**chosen)  # validated before any download
    final = output or core_ml_folder(name)
    with open_source(name, temporary, progress) as source:
        recipe = ConversionOptions(**{**chosen, "slots": _slots(chosen.get("slots"), source)})
        gates: list[Report] = []
        if gate:
            probing = ProbeOptions(
                recipe.weights, DEFAULT_UNITS, temporary, progress, recipe.stateless
            )
            gates = run_gates(source, recipe, probing)
            if not gates[-1].passed:
                verdict = gates[-1].text.splitlines()[-1]
                return Report(
                    {"name": source.name, "folder": None, "gates": [one.value for one in gates]},
                    passed=False,
                    text=f"{verdict.removeprefix('verdict: ')}; nothing was converted",
                )
        converted = make(source, final, recipe, temporary=temporary, progress=progress)
    new_name = str(final) if output else source.name + CORE_ML_SUFFIX
    return Report(
        {
            **{"name": new_name, "folder": str(final), **_contents(converted)},
            **({"gates": [one.value for one in gates]} if gate else {}),
        },
        text=f"{name} is ready in {final}; use it with --model {shlex.quote(new_name)}",
        tables=[("packages", ("package", "holds", "size"), _packages(converted))],
    )


def lint(artifact: str) -> Report:
    """Lint a Core ML model, or one `.mlpackage`, for the Neural Engine.

    Raises:
        ModelNotFound: there is no such model.
        ModelError: it is incomplete.
    """
    from paceline_coreml.lint import report

    path = Path(artifact)
    return report(path if path.suffix == ".mlpackage" else _folder(artifact))


def golden(
    artifact: str,
    *,
    source: str | None,
    tokens: int,
    threshold: float,
    rounding: str,
    temporary: Path | None,
    progress: Progress,
) -> Report:
    """Compare a Core ML model with itself, token by token, and with transformers.

    Raises:
        MissingExtra: torch, transformers or coremltools is not installed.
        ModelNotFound: there is no such model, or its source is gone.
        ModelError: it is incomplete, or its source cannot be read.
        InvalidRequest: a value is out of range.
    """
    check_tools()
    from paceline_coreml.conversion.source import open_source
    from paceline_coreml.golden import report

    folder = _folder(artifact)
    made_from = source or read_manifest(folder).source.get("from", "")
    with open_source(made_from, temporary, progress) as opened:
        return report(
            folder,
            opened.checkpoint,
            rounding=rounding,
            tokens=tokens,
            threshold=threshold,
            progress=progress,
        )


def probe(
    name: str | None,
    *,
    shape: str | None,
    layer: int,
    rows: int | None,
    slots: int | None,
    weights: str,
    stateless: bool,
    units: str,
    temporary: Path | None,
    progress: Progress,
) -> Report:
    """Convert one layer, of a shape or of a model, and check it.

    Args:
        name: see `models.open_origin`; None: a layer of `shape`, with random weights.
        shape: as `layer_shape.EXAMPLE`; None: a layer of the model.
        layer: index of the model's layer.
        rows: rows of a call of the model's layer; None: as conversions have it.
        slots: its KV cache positions; None: as conversions have it.
        weights: form of the weights.
        stateless: whether keys and values are inputs and outputs.
        units: compute units, on a Mac.
        temporary: folder for the package; None: the system's.
        progress: reports the probe.

    Raises:
        MissingExtra: torch, transformers or coremltools is not installed.
        ModelNotFound: there is no such model.
        ModelError: it cannot be read, or its family is not supported.
        InvalidRequest: a value is out of range, or the layer does not fit in memory.
    """
    if (name is None) == (shape is None):
        raise InvalidRequest("probe takes a model or --shape; expected one of the two")
    if shape is not None and (rows, slots, layer) != (None, None, 0):
        raise InvalidRequest("--rows, --slots and --layer are for a model; --shape has T and S")
    _check_temporary(temporary)
    check_tools()
    from paceline_coreml.conversion.conversion_options import ConversionOptions
    from paceline_coreml.conversion.convert import open_model
    from paceline_coreml.conversion.source import open_source
    from paceline_coreml.probe import ProbeOptions, parse_shape, probe_layer, probe_shape

    options = ProbeOptions(weights, units, temporary, progress, stateless)
    if shape is not None:
        return probe_shape(parse_shape(shape), options)
    assert name is not None
    with open_source(name, temporary, progress) as source:
        recipe = ConversionOptions(weights, rows=rows or 0, slots=_slots(slots, source))
        model = open_model(source, recipe)
        return probe_layer(source, model, layer, model.options.rows, options)


def residency(
    artifact: str, *, units: str, recorded: Path | None, record: Path | None, progress: Progress
) -> Report:
    """The devices of a model's operations, from Core ML's compute plans.

    Raises:
        ModelNotFound: there is no such model.
        ModelError: it is incomplete, or the recorded plans are of another artifact.
        InvalidRequest: this is not a Mac, and there are no recorded plans.
    """
    from paceline_coreml.residency import report

    return report(
        _folder(artifact), units=units, recorded=recorded, record=record, progress=progress
    )


def _folder(artifact: str) -> Path:
    """The folder of a Core ML model, by path or name.

    Raises InvalidRequest if the model is for another engine.
    """
    files = resolve(artifact)
    if files.engine != "coreml":
        raise InvalidRequest(
            f"{artifact} is a model for the engine {files.engine}; expected a Core ML model, as "
            f"`paceline convert {artifact} --to coreml` makes it"
        )
    return files.folder


def _check_temporary(folder: Path | None) -> None:
    if folder is not None and not folder.is_dir():
        raise InvalidRequest(f"--temporary {folder} is not a folder; expected an existing one")


def _slots(chosen: int | None, source: "Source") -> int:
    """KV cache positions. Raises InvalidRequest if they are more than the model's context."""
    longest = source.facts.context_length
    slots = chosen or min(_SLOTS, longest)
    if slots > longest:
        raise InvalidRequest(f"slots is {slots}; {source.name} has a context of {longest}")
    return slots


def check_tools() -> None:
    """Raise MissingExtra with the names of the packages that conversion lacks."""
    names = ("coremltools", "torch", "transformers")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"this needs {', '.join(missing)}; install them with: pip install 'paceline[coreml]'"
        )


def _contents(artifact: Artifact) -> dict[str, Any]:
    return {
        "family": artifact.family,
        "rows": artifact.rows,
        "functions": list(artifact.functions),
        "slots": artifact.slots,
        "taps": list(artifact.taps),
        "packages": [
            {"path": path, "holds": holds, "bytes": size_of(artifact.folder / path)}
            for path, holds, _ in _packages(artifact)
        ],
    }


def _packages(artifact: Artifact) -> Sequence[tuple[str, str, str]]:
    rows = "label" if artifact.labels else "token"
    parts = [(shard, "layer") for shard in artifact.layer_shards]
    parts += [(shard, rows) for shard in artifact.head_shards]
    return [
        (shard.path, _span(what, shard), megabytes(size_of(artifact.folder / shard.path)))
        for shard, what in parts
    ]


def _span(what: str, shard: Shard) -> str:
    if shard.end - shard.start == 1:
        return f"{what} {shard.start}"
    return f"{what}s {shard.start} to {shard.end - 1}"
