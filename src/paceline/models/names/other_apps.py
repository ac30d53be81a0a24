"""GGUF files that ollama and LM Studio have fetched, under names that can be typed.

    ollama/qwen3:0.6b                 ollama's model of this name; without a tag: latest
    lmstudio/owner/name/file.gguf     a file in LM Studio's folder of models

The files are used where they are. Invariant: their folders are only read, and what is damaged in
them is left out.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.errors import ModelError, ModelNotFound
from paceline.models.names import LocalFile
from paceline.models.names.hub_names import is_model, shard_of
from paceline.storage.files import read_json
from paceline.storage.validation import Count, Limit, validated

OLLAMA, LM_STUDIO = "ollama", "lmstudio"

_OLLAMA_FOLDERS = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
"""The user's, and that of the service which ollama's installer makes on Linux."""
_LM_STUDIO_FOLDERS = ("~/.lmstudio/models", "~/.cache/lm-studio/models")
"""Of current versions, and of earlier ones."""
_REGISTRY, _LIBRARY, _LATEST = "registry.ollama.ai", "library", "latest"
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_MODEL_LAYER = "application/vnd.ollama.image.model"
_SHOWN = 8
"""Names that a message lists."""


@dataclass(frozen=True, slots=True)
class _Layer:
    mediaType: str  # noqa: N815 (the field's name in ollama's manifests)
    digest: str
    size: Count


@dataclass(frozen=True, slots=True)
class _Manifest:
    layers: Annotated[list[_Layer], Limit(max_length=1000)]


def is_app_name(name: str) -> bool:
    """Whether `name` is that of a model of another program."""
    return name.partition("/")[0] in (OLLAMA, LM_STUDIO) and "/" in name


def find_app_model(name: str) -> Path:
    """Path of the GGUF file of another program's model.

    Raises ModelNotFound, which names the models that are there.
    """
    program = name.partition("/")[0]
    models = ollama_models() if program == OLLAMA else lm_studio_models()
    full_name = _tagged(name) if program == OLLAMA else name
    for model in models:
        if model.name.casefold() == full_name.casefold():
            return model.path
    names = [model.name for model in models]
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    listing = f"here are {shown}" if names else f"here is no model of {program}"
    raise ModelNotFound(
        f"there is no model {name}; {listing}. For a repository of that name on the hub, write "
        f"hf.co/{name}"
    )


def app_models() -> list[LocalFile]:
    """All models of other programs."""
    return ollama_models() + lm_studio_models()


def ollama_models() -> list[LocalFile]:
    """Ollama's models in GGUF files; the first folder of those that have a name is used."""
    models: dict[str, LocalFile] = {}
    chosen = os.environ.get("OLLAMA_MODELS")
    for folder in map(_expanded, [chosen] if chosen else _OLLAMA_FOLDERS):
        manifests = folder / "manifests"
        # host/namespace/name/tag
        for path in _sorted(manifests, "*/*/*/*"):
            name = _ollama_name(path.relative_to(manifests).parts)
            if name not in models and (model := _ollama_model(name, path, folder / "blobs")):
                models[name] = model
    return [*models.values()]


def lm_studio_models() -> list[LocalFile]:
    """LM Studio's models in GGUF files; shards count as one."""
    models: dict[str, LocalFile] = {}
    for folder in map(_expanded, _LM_STUDIO_FOLDERS):
        for path in _sorted(folder, "*/*/**/*.gguf"):
            relative = path.relative_to(folder).as_posix()
            name, shard = f"{LM_STUDIO}/{relative}", shard_of(str(path))
            if name in models or not is_model(relative) or (shard and shard.number != 1):
                continue
            files = [path] if shard is None else [Path(file) for file in shard.paths()]
            if all(map(_is_file, files)):
                size = sum(file.stat().st_size for file in files)
                models[name] = LocalFile(name, path, size, "from LM Studio")
    return [*models.values()]


def _ollama_model(name: str, manifest: Path, blobs: Path) -> LocalFile | None:
    """The model of a manifest; None if it has no GGUF file of its own, or is damaged."""
    try:
        content = validated(_Manifest, read_json(manifest), str(manifest), error=ModelError)
    except ModelError:
        return None
    layers = [layer for layer in content.layers if layer.mediaType == _MODEL_LAYER]
    digest = _DIGEST.fullmatch(layers[0].digest) if len(layers) == 1 else None
    if digest is None:
        return None
    path = blobs / f"sha256-{digest[1].lower()}"
    return LocalFile(name, path, layers[0].size, "from ollama") if _is_file(path) else None


def _ollama_name(parts: tuple[str, ...]) -> str:
    """The name that ollama shows, after `ollama/`; the usual host and namespace are left out."""
    host, namespace, name, tag = parts
    if host != _REGISTRY:
        name = f"{host}/{namespace}/{name}"
    elif namespace != _LIBRARY:
        name = f"{namespace}/{name}"
    return f"{OLLAMA}/{name}:{tag}"


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}:{_LATEST}"


def _sorted(folder: Path, pattern: str) -> Iterator[Path]:
    """Files below `folder`, as far as they may be read."""
    try:
        yield from sorted(path for path in folder.glob(pattern) if _is_file(path))
    except OSError:
        return


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # in a closed folder
        return False


def _expanded(folder: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError:  # a user without a home
        return Path(folder)
