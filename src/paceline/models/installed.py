"""Lists, checks and removes installed models, and lists models with a short name to download.

Invariants: every removed path is in the folder of prepared models, in the Hugging Face cache, or a
packed copy of such a file, never a file of the user or another program; and a model's listed size
is the sum of what its removal frees, and what remains on disk.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import CheckFailed, ModelError, ModelNotFound, did_you_mean
from paceline.models import hub
from paceline.models.checkpoints import mlx_available
from paceline.models.gguf.support import DRAFTERS, fits
from paceline.models.hub.gguf_files import cached, cached_models
from paceline.models.manifest import GGUF, GGUF_WEIGHTS, changed_files, read_manifest
from paceline.models.names import CORE_ML_SUFFIX, REGISTRY, LocalFile, canonical, known_models
from paceline.models.names.other_apps import ollama_models
from paceline.models.prepare import models_dir
from paceline.storage.files import remove, size_of
from paceline.storage.gguf_file import architecture_of
from paceline.storage.manifest import MANIFEST
from paceline.storage.progress import QUIET, Progress
from paceline.storage.shards import shards_beside
from paceline.storage.text import visible


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that is installed or can be downloaded."""

    name: str
    here: bool
    about: str
    folder: Path | None = None
    """The folder of a prepared model, or of a checkpoint."""
    bytes: int = 0
    """On this disk, without packed copies; 0 if it is not installed."""
    file: Path | None = None
    """The GGUF file that is used in place; of a split model, the first."""
    fits: bool | None = None
    """True if it fits this machine's memory; None for a model that cannot be read."""
    to_fetch: int = 0
    """Download size of a model that is not installed."""
    context_length: int | None = None
    """In tokens; None: unknown until it is prepared."""
    device: str | None = None
    """Device of a GGUF file; None: the CPU, on a machine without another device."""


def list_models(cache: Path | None = None) -> list[ModelEntry]:
    """List prepared models, those in the Hugging Face cache and other apps, then downloads.

    Every name can be used, except those of broken models. A file with several names is listed once.
    """
    files = {file.path.resolve(): file for file in _files()}
    prepared = [_entry_of(folder, files) for folder in _prepared(cache)]
    models = {listed.name: listed for listed in prepared}
    checkpoints = hub.cached_folders(hub.CHECKPOINT) if mlx_available() else ()
    for name, snapshot in checkpoints:
        size = size_of(snapshot, links=True)
        listed = ModelEntry(name, True, "from the hub", snapshot, size, fits=fits(size))
        models.setdefault(name, listed)
    for file in files.values():
        listed = ModelEntry(
            file.name, True, file.about, None, file.bytes, file.path, fits(file.bytes)
        )
        models.setdefault(file.name, listed)
    here = sorted(models.values(), key=lambda model: not model.here)
    return [*here, *(model for model in _to_fetch() if model.name not in models)]


def list_drafters() -> Iterator[ModelEntry]:
    """Yield drafters in the Hugging Face cache: GGUF files, and folders, including checkpoints."""
    for file in filter(_drafts, cached_models()):
        yield ModelEntry(file.name, True, file.about, None, file.bytes, file.path)
    for name, folder in hub.cached_folders(hub.DRAFTER):
        yield ModelEntry(name, True, "from the hub", folder, size_of(folder, links=True))


def _drafts(file: LocalFile) -> bool:
    return architecture_of(file.path) in DRAFTERS


def check_models(cache: Path | None = None, progress: Progress = QUIET) -> int:
    """Return the number of prepared models. Raises CheckFailed, naming every changed file."""
    faults: list[str] = []
    folders = _prepared(cache)
    for folder in folders:
        try:
            changed = changed_files(folder, read_manifest(folder), progress)
        except ModelError as error:
            changed = [hub.one_line(error)]
        faults += [f"{folder.name}: {fault}" for fault in changed]
    if faults:
        raise CheckFailed(
            f"{'; '.join(faults)}; remove the folder in {models_dir(cache)} and pull again"
        )
    return len(folders)


def _prepared(cache: Path | None) -> list[Path]:
    return sorted(path.parent for path in models_dir(cache).glob("*/" + MANIFEST))


def _files() -> Iterator[LocalFile]:
    """Yield GGUF files that are used in place; of several names of a file, the last is the best."""
    yield from ollama_models()
    sizes = {}
    for file in cached_models():
        sizes[file.path] = file.bytes
        if not _drafts(file):
            yield file
    for name, known in known_models().items():
        if (path := cached(known.hub_name)) is not None:
            yield LocalFile(name, path, sizes.get(path, path.stat().st_size), known.about)


def _to_fetch() -> Iterator[ModelEntry]:
    """Yield models with a short name."""
    for name, wheel in REGISTRY.items():
        fitting = fits(wheel.member_bytes)
        yield ModelEntry(name, False, wheel.about, fits=fitting, to_fetch=wheel.wheel_bytes)
    for name, known in known_models().items():
        yield ModelEntry(name, False, known.about, fits=fits(known.bytes), to_fetch=known.bytes)


def _entry_of(folder: Path, files: dict[Path, LocalFile]) -> ModelEntry:
    """Describe a prepared model; one made from a GGUF file in `files` has that file's name."""
    try:
        manifest = read_manifest(folder)
    except ModelError as error:
        return ModelEntry(folder.name, False, f"broken: {hub.one_line(error)}", folder)
    name, origin = manifest.name, manifest.source.get("from", "")
    kind, context = manifest.source.get("kind", ""), manifest.facts.context_length
    about = " ".join(filter(None, (origin, manifest.facts.license)))
    size = sum(record.bytes for record in manifest.files.values())
    if name in REGISTRY:
        about = REGISTRY[name].about
    if manifest.engine == "coreml":
        name, about = name + CORE_ML_SUFFIX, f"for Core ML; {about}"
    path = manifest.gguf(folder) or folder
    if kind == GGUF and not path.is_file():
        gone = "source file missing; `paceline rm` deletes the cached data"
        return ModelEntry(name, False, gone, folder, size, path)
    if kind != GGUF:
        return ModelEntry(name, True, about, folder, size, fits=fits(size), context_length=context)
    weights = sum(size_of(shard, links=True) for shard in shards_beside(path))
    file = files.get(path.resolve(), LocalFile(name, path, weights, about))
    total, fitting = size + file.bytes, fits(file.bytes)
    return ModelEntry(
        file.name, True, file.about, folder, total, file.path, fitting, context_length=context
    )


@dataclass(frozen=True, slots=True)
class Removal:
    paths: tuple[Path, ...]
    """Folders and files."""
    weights: tuple[Path, ...]
    """GGUF files of the model as engines open them, removed or not."""
    stays: tuple[Path, ...]
    """Its files that do not belong to paceline."""

    @property
    def bytes(self) -> int:
        """Size of everything that is removed."""
        return sum(map(size_of, self.paths))

    @property
    def bytes_on_disk(self) -> int:
        """Size of the model on this disk: removed and remaining files."""
        return self.bytes + sum(map(size_of, self.stays))

    def with_paths(self, more: Callable[[Iterable[Path]], Iterable[Path]]) -> "Removal":
        """Add the paths that `more` returns for the GGUF files."""
        return replace(self, paths=(*self.paths, *more(self.weights)))

    def remove(self) -> None:
        """Remove everything. Raises ModelError for paths that cannot be removed."""
        for path in self.paths:
            remove(path)


def find_removal(name: str, cache: Path | None = None) -> Removal:
    """Return all forms of a model to remove. Raises ModelNotFound if it is not installed."""
    listed = [model for model in list_models(cache) if model.here or model.folder is not None]
    listed += list_drafters()
    searched = visible(canonical(name), line=True).casefold()
    models = [model for model in listed if model.name.casefold().partition("@")[0] == searched]
    models = models or [model for model in listed if model.name.casefold() == searched]
    if not models:
        names = [model.name for model in listed]
        raise ModelNotFound(
            f"model {name} is not installed; {did_you_mean(name, names)}installed models: "
            f"{', '.join(names) or 'none'}"
        )
    return removal_of(models, cache)


def removal_of(models: Sequence[ModelEntry], cache: Path | None = None) -> Removal:
    hub_cache, prepared = hub.cache_folder(), models_dir(cache)
    paths, weights, stays = list[Path](), list[Path](), list[Path]()
    for model in models:
        if (folder := model.folder) is not None:
            if folder.is_relative_to(hub_cache):
                paths.append(hub_cache / folder.relative_to(hub_cache).parts[0])
            elif folder.is_relative_to(prepared):
                paths.append(folder)
            weights.append(folder / GGUF_WEIGHTS)
        if (file := model.file) is not None:
            weights.append(file)
            for shard in shards_beside(file):
                if file.is_relative_to(hub_cache):
                    paths += (shard.resolve(), shard)
                elif shard.is_file():
                    stays.append(shard)
    return Removal(*(tuple(dict.fromkeys(found)) for found in (paths, weights, stays)))
