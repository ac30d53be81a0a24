"""Models on this machine, and those of the registry that are not fetched yet."""

from dataclasses import dataclass
from pathlib import Path

from paceline.errors import CheckFailed, ModelError
from paceline.models import hub
from paceline.models.cache import models_dir
from paceline.models.manifest import changed_files, read_manifest
from paceline.models.names import CORE_ML_SUFFIX
from paceline.models.progress import QUIET, Progress
from paceline.models.registry import REGISTRY
from paceline.storage.manifest import MANIFEST


@dataclass(frozen=True, slots=True)
class Listed:
    """A model that is here or can be fetched."""

    name: str
    here: bool
    about: str
    folder: Path | None
    bytes: int
    """On this disk; 0 when it is not here."""


def list_models(cache: Path | None = None) -> list[Listed]:
    """The registry, the prepared models, and the OpenVINO models in the hub's cache."""
    here: dict[str, Listed] = {}
    for folder in _prepared(cache):
        listed = _listed(folder)
        here[listed.name] = listed
    for name in hub.cached_names():
        snapshot = hub.cached_snapshot(name)
        size = sum(file.stat().st_size for file in snapshot.iterdir()) if snapshot else 0
        here.setdefault(name, Listed(name, True, "from the hub", snapshot, size))
    absent = [
        Listed(model.name, False, f"{model.about}; {model.size} to fetch", None, 0)
        for model in REGISTRY.values()
        if model.name not in here
    ]
    return absent + list(here.values())


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


def _prepared(cache: Path | None) -> list[Path]:
    return sorted(path.parent for path in models_dir(cache).glob("*/" + MANIFEST))


def _listed(folder: Path) -> Listed:
    try:
        manifest = read_manifest(folder)
    except ModelError as error:
        return Listed(folder.name, False, f"broken: {_one_line(error)}", folder, 0)
    name, about = manifest.name, manifest.source.get("from")
    about = " ".join(filter(None, (about, manifest.facts.license)))
    if name in REGISTRY:
        about = REGISTRY[name].about
    if manifest.engine == "coreml":
        name, about = name + CORE_ML_SUFFIX, f"for Core ML; {about}"
    size = sum(record.bytes for record in manifest.files.values())
    return Listed(name, True, about, folder, size)


def _one_line(error: ModelError) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines())
