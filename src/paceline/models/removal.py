"""Removes a model: what was fetched or made for it, never a file of the user or another program.

Invariants: every path that is removed is in the folder of prepared models, in the hub's cache, or a
packed copy of such a file; and the size of a model in a list is what its removal frees, and what
stays of it.
"""

import difflib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ModelError, ModelNotFound
from paceline.models import hub
from paceline.models.installed import Listed, list_models
from paceline.models.manifest import Manifest, read_manifest
from paceline.models.names import canonical
from paceline.models.names.hub_names import shards_beside
from paceline.models.prepare import models_dir
from paceline.storage.files import size_of


@dataclass(frozen=True, slots=True)
class Removal:
    """What removing a model removes."""

    paths: tuple[Path, ...]
    """Folders and files."""
    weights: tuple[Path, ...]
    """GGUF files of the model as engines open them, removed or not."""
    stays: tuple[Path, ...]
    """Its files that are not paceline's."""

    @property
    def bytes(self) -> int:
        """Size of all that is removed."""
        return sum(map(size_of, self.paths))

    @property
    def bytes_on_disk(self) -> int:
        """Size of the model on this disk: what is removed, and what stays."""
        return self.bytes + sum(map(size_of, self.stays))

    def with_paths(self, more: Callable[[Iterable[Path]], Iterable[Path]]) -> "Removal":
        """Also remove what `more` returns for the GGUF files."""
        return replace(self, paths=(*self.paths, *more(self.weights)))

    def remove(self) -> None:
        """Remove all of it. Raises ModelError for what cannot be removed."""
        for path in self.paths:
            try:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise ModelError(f"cannot remove {path}: {error.strerror}") from error


def find_removal(name: str, cache: Path | None = None) -> Removal:
    """What removing the model `name` removes, all its forms included.

    Raises ModelNotFound if it is not here.
    """
    listed = [model for model in list_models(cache) if model.here or model.folder is not None]
    searched = canonical(name).casefold()
    models = [model for model in listed if model.name.casefold().partition("@")[0] == searched]
    models = models or [model for model in listed if model.name.casefold() == searched]
    if not models:
        names = [model.name for model in listed]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ModelNotFound(
            f"{name} is not on this machine; {hint}here are {', '.join(names) or 'none'}"
        )
    return removal_of(models, cache)


def removal_of(models: Sequence[Listed], cache: Path | None = None) -> Removal:
    """What removing these models removes, which are on this machine."""
    opened = dict.fromkeys(path for model in models for path in _opened(model))
    paths = dict.fromkeys(path for model in models for path in _paths(model, cache))
    files = dict.fromkeys(path for model in models for path in _files(model))
    stays = [path for path in files if path.is_file() and not _is_ours(path, cache)]
    return Removal(tuple(paths), tuple(opened), tuple(stays))


def _paths(model: Listed, cache: Path | None) -> Iterator[Path]:
    hub_cache = hub.cache_folder()
    if model.folder is not None:
        if model.folder.is_relative_to(hub_cache):
            yield hub_cache / model.folder.relative_to(hub_cache).parts[0]
        elif model.folder.is_relative_to(models_dir(cache)):
            yield model.folder
    if model.file is not None and model.file.is_relative_to(hub_cache):
        for shard in shards_beside(model.file) or [model.file]:
            yield shard.resolve()
            yield shard


def _opened(model: Listed) -> Iterator[Path]:
    """The GGUF files that engines open, in all likelihood: packed copies are of these."""
    if model.file is not None:
        yield model.file
    path = _gguf_of(model)
    if path is not None:
        yield path


def _files(model: Listed) -> Iterator[Path]:
    """The GGUF files with the model's weights, all shards, where they are used in place."""
    path = model.file or _gguf_of(model)
    if path is not None:
        yield from shards_beside(path) or [path]


def _gguf_of(model: Listed) -> Path | None:
    """The GGUF file of a prepared model, in its folder or elsewhere."""
    manifest = _manifest_of(model)
    return None if manifest is None or model.folder is None else manifest.gguf(model.folder)


def _manifest_of(model: Listed) -> Manifest | None:
    try:
        return None if model.folder is None else read_manifest(model.folder)
    except ModelError:  # broken, or a folder of the hub
        return None


def _is_ours(path: Path, cache: Path | None) -> bool:
    return path.is_relative_to(hub.cache_folder()) or path.is_relative_to(models_dir(cache))
