"""GGUF files of repositories on the Hugging Face Hub: cached ones, and downloads.

Independent of the files' contents. Invariant: a name whose file is cached is used without a
request to the Hub, so it works without a network; only `fetch` contacts the Hub.
"""

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

from paceline.errors import ModelError, ModelNotFound
from paceline.models import hub
from paceline.models.gguf.support import check_fits
from paceline.models.hub import Repository
from paceline.models.hub.download import download
from paceline.models.names import LocalFile
from paceline.models.names.hub_names import (
    HubName,
    choose,
    is_model,
    models_of,
    parse_hub_name,
    quantization,
    shards_of,
    tag_of,
    tags_of,
)
from paceline.storage.progress import QUIET, Progress
from paceline.storage.shards import SUFFIX, shard_of

_SHORTEST_COMMIT = 7
"""Characters of an abbreviated commit."""


def cached(name: HubName) -> Path | None:
    """Return the path of the cached GGUF file that `name` means, with all shards, or None.

    Without a tag, it is chosen among the cached files.
    """
    for folder in _snapshots(name.repository, name.revision):
        paths = _ggufs(folder)
        with contextlib.suppress(ModelError):  # none, several, or not all shards
            path = _chosen(name, paths)
            shards_of(path, paths, name.repository)
            return folder / path
    return None


def cached_models() -> list[LocalFile]:
    """Return all models in cached GGUF files, each under its shortest name."""
    models: dict[str, LocalFile] = {}
    for repository in hub.cached_names():
        for snapshot in _snapshots(repository, None):
            paths = _ggufs(snapshot)
            for path in models_of(paths):
                if model := _cached_model(repository, snapshot, path, paths):
                    models.setdefault(model.name, model)
    return [*models.values()]


def fetch(name: HubName, repository: Repository, progress: Progress, *, to_use: bool) -> Path:
    """Download the GGUF file that `name` means, with all its shards; return the first.

    With `to_use`, the model will run on this machine, and so has to fit into memory. Raises
    ModelNotFound and ModelError; see `choose` and `download`.
    """
    files = repository.files
    if not any(map(is_model, files)):
        raise _nothing_usable(repository)
    paths = shards_of(_chosen(name, files), files, name.repository)
    if to_use:
        size = sum(files[path].bytes for path in paths)
        check_fits(str(name), size, QUIET, f", or only download it with `paceline pull {name}`")
    return download(repository, paths, name.revision, progress)


def _nothing_usable(repository: Repository) -> ModelError:
    """Return the error for a repository without a supported format."""
    paths = repository.files
    if others := [path for path in paths if path.endswith(SUFFIX)]:
        advice = f"{others[0]} is not a language model"
    elif "config.json" in paths and any(path.endswith(".safetensors") for path in paths):
        advice = f"it is {hub.instead()}"
    else:
        advice = "look for a repository of the same model with GGUF files"
    return ModelError(f"{repository.name} has no GGUF file; {advice}")


def _chosen(name: HubName, paths: Collection[str]) -> str:
    """Return the first shard of the model that `name` means among a repository's files."""
    if not name.file:
        return choose(paths, name.tag, name.repository)
    # Repositories change the case of names (gpt-oss-20b-mxfp4.gguf became ...-MXFP4.gguf).
    same = [path for path in paths if path.lower() == name.file.lower()]
    if not same:
        others = tags_of(models_of(paths)) or "no GGUF file of a language model"
        raise ModelNotFound(f"{name.repository} has no file {name.file}; it has {others}")
    path = name.file if name.file in same else same[0]
    if not is_model(path):
        raise ModelError(f"{name} is not a language model; it belongs to one")
    shard = shard_of(path)
    return path if shard is None else shard.paths()[0]


def _cached_model(
    repository: str, snapshot: Path, path: str, paths: Collection[str]
) -> LocalFile | None:
    """Return the model `path` of a snapshot; None if a shard is missing, or no name means it."""
    label = quantization(path)
    names = [HubName(repository, file=path)]
    if label and label == tag_of(path, paths):
        names.insert(0, HubName(repository, tag=label))
    for name in names:
        if parse_hub_name(str(name)) == name and cached(name) == snapshot / path:
            shards = shards_of(path, paths, repository)
            size = sum((snapshot / shard).stat().st_size for shard in shards)
            return LocalFile(str(name), snapshot / path, size, "from the Hub")
    return None


def _snapshots(repository: str, revision: str | None) -> Iterator[Path]:
    """Return folders of a repository's cached commits that match `revision`, likeliest first.

    For the main branch these are the last known commit, then all others, newest first.
    """
    folder = hub.folder_of(repository)
    try:
        last = (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        last = ""
    with contextlib.suppress(OSError):
        commits = sorted(
            (path for path in (folder / "snapshots").iterdir() if path.is_dir()),
            key=lambda path: (path.name == last, path.stat().st_mtime),
            reverse=True,
        )
        for path in commits:
            short = revision is not None and len(revision) >= _SHORTEST_COMMIT
            if revision is None or path.name == last or (short and path.name.startswith(revision)):
                yield path


def _ggufs(snapshot: Path) -> set[str]:
    """Return the paths of a snapshot's complete GGUF files, with slashes."""
    return {
        path.relative_to(snapshot).as_posix()
        for path in snapshot.rglob("*")
        if path.suffix.lower() == SUFFIX and path.is_file()
    }
