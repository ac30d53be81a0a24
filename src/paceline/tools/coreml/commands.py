"""What the commands about Core ML do: from plain arguments to a report.

Loads torch and coremltools when a command runs that needs them, not before.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.engines.coreml.artifact import Artifact, Shard
from paceline.errors import InvalidRequest, MissingExtra
from paceline.models import CORE_ML_SUFFIX, Progress, core_ml_folder, resolve
from paceline.models.cache import megabytes
from paceline.models.manifest import read_manifest
from paceline.storage.report import Report

_SLOTS = 2048
"""The longest text where nobody says, or as much as the model was made for."""


def convert(
    name: str,
    *,
    recipe: Mapping[str, Any],
    output: Path | None,
    temporary: Path | None,
    progress: Progress,
) -> Report:
    """Make the Core ML form of a model, or what is missing of it.

    Args:
        name: see `models.open_origin`.
        recipe: fields of `convert.Recipe`; None is the default.
        output: the folder to make; None: the cache, where `NAME@coreml` finds it.
        temporary: where shards are made before they are moved; None: the system's folder.
        progress: told how far it is.

    Raises:
        MissingExtra: torch, transformers or coremltools is not installed.
        ModelNotFound: there is no such model.
        ModelError: it cannot be read, or is of a family or form not known here.
        InvalidRequest: a value is out of range, or the folder cannot be used.
    """
    check_tools()
    from paceline.tools.coreml.convert import convert as make
    from paceline.tools.coreml.recipe import Recipe
    from paceline.tools.coreml.source import open_source

    if temporary is not None and not temporary.is_dir():
        raise InvalidRequest(f"--temporary {temporary} is not a folder; expected one that exists")
    chosen = {key: value for key, value in recipe.items() if value is not None}
    Recipe(**chosen)  # before anything is fetched
    final = output or core_ml_folder(name)
    with open_source(name, temporary, progress) as source:
        longest = source.facts.context_length
        slots = chosen.get("slots", min(_SLOTS, longest))
        if slots > longest:
            raise InvalidRequest(f"slots is {slots}; {source.name} was made for {longest} at most")
        made = make(
            source,
            final,
            Recipe(**{**chosen, "slots": slots}),
            temporary=temporary,
            progress=progress,
        )
    called = str(final) if output else source.name + CORE_ML_SUFFIX
    return Report(
        {"name": called, "folder": str(final), **_contents(made)},
        text=f"{called} is ready in {final}; use it by that name",
        tables=[("packages", ("package", "holds", "size"), _packages(made))],
    )


def lint(artifact: str) -> Report:
    """What of a model, or of one `.mlpackage`, the Neural Engine would not take.

    Raises:
        ModelNotFound: there is no such model.
        ModelError: it is not whole.
    """
    from paceline.tools.coreml.lint import report

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
    """A model against itself, a token at a time, and against transformers.

    Raises:
        MissingExtra: torch, transformers or coremltools is not installed.
        ModelNotFound: there is no such model, or what it was made from is gone.
        ModelError: it is not whole, or its source cannot be read.
        InvalidRequest: a value is out of range.
    """
    check_tools()
    from paceline.tools.coreml.golden import report
    from paceline.tools.coreml.source import open_source

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


def residency(
    artifact: str,
    *,
    units: str,
    recorded: Path | None,
    record: Path | None,
    progress: Progress,
) -> Report:
    """Where the operations of a model run, as Core ML plans it.

    Raises:
        ModelNotFound: there is no such model.
        ModelError: it is not whole, or the recorded plan is none of it.
        InvalidRequest: this is no Mac, and no recorded plan was given.
    """
    from paceline.tools.coreml.residency import report

    return report(
        _folder(artifact), units=units, recorded=recorded, record=record, progress=progress
    )


def _folder(artifact: str) -> Path:
    """The folder of a Core ML model: as given, or by its name.

    Raises:
        InvalidRequest: it is a model for another engine.
    """
    files = resolve(artifact)
    if files.engine != "coreml":
        raise InvalidRequest(
            f"{artifact} is a model for the engine {files.engine}; expected a Core ML model, as "
            f"`paceline convert {artifact} --to coreml` makes it"
        )
    return files.folder


def check_tools() -> None:
    """Raise MissingExtra that names what is not installed of what conversion needs."""
    names = ("coremltools", "torch", "transformers")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"this needs {', '.join(missing)}; install them with: pip install 'paceline[coreml]'"
        )


def _contents(made: Artifact) -> dict[str, Any]:
    return {
        "family": made.family,
        "rows": made.rows,
        "functions": list(made.functions),
        "slots": made.slots,
        "taps": list(made.taps),
        "packages": [
            {"path": path, "holds": holds, "bytes": _bytes(made.folder / path)}
            for path, holds, _ in _packages(made)
        ],
    }


def _packages(made: Artifact) -> Sequence[tuple[str, str, str]]:
    rows = "label" if made.labels else "token"
    parts = [(shard, "layer") for shard in made.layer_shards]
    parts += [(shard, rows) for shard in made.head_shards]
    return [
        (
            shard.path,
            _span(what, shard),
            megabytes(_bytes(made.folder / shard.path)),
        )
        for shard, what in parts
    ]


def _span(what: str, shard: Shard) -> str:
    if shard.end - shard.start == 1:
        return f"{what} {shard.start}"
    return f"{what}s {shard.start} to {shard.end - 1}"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
