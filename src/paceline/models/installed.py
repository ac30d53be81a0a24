"""Models on this machine, and those with a short name that are not fetched yet."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.errors import CheckFailed, ModelError
from paceline.models import hub
from paceline.models.gguf.support import fits
from paceline.models.hub.gguf_files import cached, cached_models
from paceline.models.manifest import GGUF, Manifest, changed_files, read_manifest
from paceline.models.names import CORE_ML_SUFFIX, REGISTRY, KnownModel, known_models
from paceline.models.names.other_apps import app_models
from paceline.models.prepare import models_dir
from paceline.storage.manifest import MANIFEST
from paceline.storage.progress import QUIET, Progress

_RAN = {"file": "the file", "shape": "its shape"}
"""What was run of a known model, in words."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A model that is here or can be fetched."""

    name: str
    here: bool
    about: str
    folder: Path | None
    """Of a model that paceline has prepared, or that is in OpenVINO's format."""
    bytes: int
    """On this disk, without packed copies; 0 when it is not here."""
    file: Path | None = None
    """The GGUF file that is used where it is; of a split model, the first."""
    fits: bool | None = None
    """Whether it fits this machine's memory; None for a model that cannot be read."""
    to_fetch: int = 0
    """Bytes of a model that is not here."""
    context_length: int | None = None
    """In tokens; None: not known before it is prepared."""
    tested: str = ""
    """What was run of a model that is not here."""


class _File(NamedTuple):
    """A GGUF file that is used where it is."""

    name: str
    path: Path
    bytes: int
    about: str


def list_models(cache: Path | None = None) -> list[Listed]:
    """Prepared models, those in the hub's cache and of other programs; then others to fetch.

    Every name can be used, but of a model that is broken. A file that has several is listed once.
    """
    models: dict[str, Listed] = {}
    files = {file.path.resolve(): file for file in _files()}
    for folder in _prepared(cache):
        listed = _listed(folder, files)
        models[listed.name] = listed
    for name in hub.cached_names():
        snapshot = hub.cached_snapshot(name)
        size = sum(file.stat().st_size for file in snapshot.iterdir()) if snapshot else 0
        listed = Listed(name, True, "from the hub", snapshot, size, fits=fits(size))
        models.setdefault(name, listed)
    for file in files.values():
        listed = Listed(
            file.name, True, file.about, None, file.bytes, file.path, fits=fits(file.bytes)
        )
        models.setdefault(file.name, listed)
    prepared = sorted(models.values(), key=lambda model: not model.here)
    return [*prepared, *(model for model in _absent() if model.name not in models)]


def check_models(cache: Path | None = None, progress: Progress = QUIET) -> int:
    """Number of prepared models, all of which have the checksums they were made with.

    Raises CheckFailed if files have changed; the message names every fault.
    """
    faults: list[str] = []
    folders = _prepared(cache)
    for folder in folders:
        try:
            changed = changed_files(folder, read_manifest(folder), progress)
        except ModelError as error:
            changed = [_one_line(error)]
        faults += [f"{folder.name}: {fault}" for fault in changed]
    if faults:
        raise CheckFailed(
            f"{'; '.join(faults)}; remove the folder in {models_dir(cache)} and pull again"
        )
    return len(folders)


def _absent() -> Iterator[Listed]:
    """Models that can be fetched by a short name."""
    for model in REGISTRY.values():
        fitting = fits(model.member_bytes)
        yield Listed(
            model.name, False, model.about, None, 0, fits=fitting, to_fetch=model.wheel_bytes
        )
    for name, known in known_models().items():
        about, fitting = _about(known), fits(known.bytes)
        tested = _tested(known)
        yield Listed(name, False, about, None, 0, fits=fitting, to_fetch=known.bytes, tested=tested)


def _tested(known: KnownModel) -> str:
    """What was run of a model."""
    if known.ran is None:
        return "not tried yet"
    return f"{_RAN[known.ran]} tested"


def _about(known: KnownModel) -> str:
    return f"{known.title}, {known.license}"


def _files() -> Iterator[_File]:
    """GGUF files that are used in place. Of a file with several names, the last is the best."""
    for model in app_models():
        yield _File(model.name, model.path, model.bytes, f"from {model.program}")
    sizes = {}
    for gguf in cached_models():
        sizes[gguf.path] = gguf.bytes
        yield _File(str(gguf.name), gguf.path, gguf.bytes, "from the hub")
    for name, known in known_models().items():
        path = cached(known.hub_name)
        if path is not None:
            size = sizes.get(path, path.stat().st_size)
            yield _File(name, path, size, _about(known))


def _prepared(cache: Path | None) -> list[Path]:
    return sorted(path.parent for path in models_dir(cache).glob("*/" + MANIFEST))


def _listed(folder: Path, files: dict[Path, _File]) -> Listed:
    """A prepared model; one made of a GGUF file in `files` has that file's name."""
    try:
        manifest = read_manifest(folder)
    except ModelError as error:
        return Listed(folder.name, False, f"broken: {_one_line(error)}", folder, 0)
    name, origin = manifest.name, manifest.source.get("from")
    about = " ".join(filter(None, (origin, manifest.facts.license)))
    size = sum(record.bytes for record in manifest.files.values())
    if name in REGISTRY:
        about = REGISTRY[name].about
    if manifest.engine == "coreml":
        name, about = name + CORE_ML_SUFFIX, f"for Core ML; {about}"
    file, weights = None, 0
    if origin is not None and _is_of_a_file(manifest):
        path = Path(origin).resolve()
        if manifest.source["kind"] == GGUF and not path.is_file():
            gone = "its file is gone; `paceline rm` frees the rest"
            return Listed(name, False, gone, folder, size)
        file, weights = files.get(path), path.stat().st_size if path.is_file() else 0
    context = manifest.facts.context_length
    if file is None:
        fitting = fits(max(size, weights))
        return Listed(name, True, about, folder, size, fits=fitting, context_length=context)
    total, fitting = size + file.bytes, fits(file.bytes)
    return Listed(
        file.name, True, file.about, folder, total, file.path, fitting, context_length=context
    )


def _is_of_a_file(manifest: Manifest) -> bool:
    return manifest.source.get("kind", "").startswith("gguf")


def _one_line(error: ModelError) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines())
