"""Removes a model: what was fetched or made for it, never a file of the user or another program.

Invariant: every path that is removed is in the folder of prepared models, in the hub's cache, or a
packed copy of such a file.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ModelError, ModelNotFound
from paceline.models import hub
from paceline.models.installed import Listed, list_models
from paceline.models.manifest import GGUF_WEIGHTS
from paceline.models.names import canonical
from paceline.models.names.hub_names import shards_beside
from paceline.models.prepare import models_dir


@dataclass(frozen=True, slots=True)
class Removal:
    """What removing a model removes."""

    paths: tuple[Path, ...]
    """Folders and files."""
    weights: tuple[Path, ...]
    """GGUF files of the model, removed or not."""
    stays: tuple[str, ...]
    """A line for each file that stays."""

    @property
    def bytes(self) -> int:
        """Size of all that is removed."""
        return sum(map(_size, self.paths))

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
        names = ", ".join(model.name for model in listed) or "none"
        raise ModelNotFound(f"{name} is not on this machine; here are {names}")
    paths = dict.fromkeys(path for model in models for path in _paths(model, models_dir(cache)))
    weights = {path for model in models for path in _weights(model)}
    stays = [f"{path} stays: it is not paceline's" for path in weights if not _is_ours(path, cache)]
    return Removal(tuple(paths), tuple(weights), tuple(sorted(stays)))


def _paths(model: Listed, prepared: Path) -> Iterator[Path]:
    hub_cache = hub.cache_folder()
    if model.folder is not None:
        if model.folder.is_relative_to(hub_cache):
            yield hub_cache / model.folder.relative_to(hub_cache).parts[0]
        elif model.folder.is_relative_to(prepared):
            yield model.folder
    if model.file is not None and model.file.is_relative_to(hub_cache):
        for shard in shards_beside(model.file) or [model.file]:
            yield shard.resolve()
            yield shard


def _weights(model: Listed) -> Iterator[Path]:
    if model.folder is not None and (own := model.folder / GGUF_WEIGHTS).is_file():
        yield own
    if model.file is not None:
        yield model.file
    elif model.folder is not None and Path(model.name).is_file():  # named by its file
        yield Path(model.name)


def _is_ours(path: Path, cache: Path | None) -> bool:
    return path.is_relative_to(hub.cache_folder()) or path.is_relative_to(models_dir(cache))


def _size(path: Path) -> int:
    """Bytes of a file, or of the files in a folder; links count nothing."""
    files = [path] if not path.is_dir() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())
