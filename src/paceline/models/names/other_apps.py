"""GGUF files downloaded by ollama, used in place: `ollama/NAME:TAG`, default `NAME:latest`.

Invariant: ollama's folders are only read, and damaged entries are skipped.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ModelError, ModelNotFound
from paceline.models.names import LocalFile
from paceline.storage.files import read_json
from paceline.storage.validation import Count, validated

_OLLAMA = "ollama"

_OLLAMA_FOLDERS = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
"""The user's folder, and that of the service that ollama's installer creates on Linux."""
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_MODEL_LAYER = "application/vnd.ollama.image.model"
_SHOWN = 8
"""Maximum names that a message lists."""


@dataclass(frozen=True, slots=True)
class _Layer:
    mediaType: str  # noqa: N815 (the field's name in ollama's manifests)
    digest: str
    size: Count


@dataclass(frozen=True, slots=True)
class _Manifest:
    layers: list[_Layer]


def is_app_name(name: str) -> bool:
    return name.startswith(f"{_OLLAMA}/")


def find_app_model(name: str) -> Path:
    """Return the path of ollama's GGUF file. Raises ModelNotFound, which lists the models."""
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    models = ollama_models()
    for model in models:
        if model.name.casefold() == tagged.casefold():
            return model.path
    names = [model.name for model in models]
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    listing = f"installed models: {shown}" if names else "no Ollama models are installed"
    raise ModelNotFound(
        f"model {name} not found: {listing}. For a repository of that name on the Hub, use "
        f"hf.co/{name}"
    )


def ollama_models() -> list[LocalFile]:
    """Return ollama's GGUF models; of several folders with a name, the first is used."""
    models: dict[str, LocalFile] = {}
    chosen = os.environ.get("OLLAMA_MODELS")
    for text in [chosen] if chosen else _OLLAMA_FOLDERS:
        try:
            folder = Path(text).expanduser()
            manifests = sorted(folder.glob("manifests/*/*/*/*"))  # host/namespace/name/tag
        except (OSError, RuntimeError):  # a closed folder, or a user without a home
            continue
        for path in manifests:
            name = _ollama_name(*path.parts[-4:])
            if name not in models and (model := _ollama_model(name, path, folder / "blobs")):
                models[name] = model
    return [*models.values()]


def _ollama_model(name: str, manifest: Path, blobs: Path) -> LocalFile | None:
    """Return the model of a manifest; None if it has no GGUF file of its own, or is damaged."""
    try:
        content = validated(_Manifest, read_json(manifest), str(manifest), error=ModelError)
        layers = [layer for layer in content.layers if layer.mediaType == _MODEL_LAYER]
        digest = _DIGEST.fullmatch(layers[0].digest) if len(layers) == 1 else None
        path = blobs / f"sha256-{digest[1].lower()}" if digest else None
        if path is not None and path.is_file():
            return LocalFile(name, path, layers[0].size, "from ollama")
    except (ModelError, OSError):  # OSError: a closed folder
        pass
    return None


def _ollama_name(host: str, namespace: str, name: str, tag: str) -> str:
    if host != "registry.ollama.ai":
        name = f"{host}/{namespace}/{name}"
    elif namespace != "library":
        name = f"{namespace}/{name}"
    return f"{_OLLAMA}/{name}:{tag}"
