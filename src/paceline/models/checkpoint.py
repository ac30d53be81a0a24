"""A Hugging Face checkpoint that is run as it is, without being converted: for the engine `mlx`.

Knows which files make one whole, and where one comes from. Knows nothing of what they hold.
"""

import hashlib
import importlib.util
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import ModelError, ModelNotFound
from paceline.models import hub
from paceline.models.files import ModelFiles
from paceline.models.hf_config import read_facts, read_template
from paceline.models.manifest import GRAPH, TOKENIZER
from paceline.models.progress import Progress
from paceline.storage.files import read_json

MLX_SUFFIX = "@mlx"
"""Behind a model's name: its checkpoint, for the engine `mlx`."""

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"


def runs_as_it_is() -> bool:
    """Whether a checkpoint need not be converted here: on Apple Silicon, with mlx-lm installed."""
    apple_silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return apple_silicon and importlib.util.find_spec("mlx_lm") is not None


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a checkpoint, and not also a model for OpenVINO."""
    weights = any(folder.glob("model*.safetensors"))
    return weights and (folder / _CONFIG).is_file() and not (folder / GRAPH).exists()


def find_checkpoint(name: str, path: Path, progress: Progress) -> ModelFiles:
    """The checkpoint that `name`, or the same as a path, means; the hub's when there is none here.

    Raises:
        ModelNotFound: there is no such folder, and the hub has no such model.
        ModelError: it is no checkpoint, or cannot be fetched or read.
    """
    if path.is_dir():
        return open_checkpoint(path.resolve(), name)
    if hub.is_hub_name(name) and not path.exists():
        return open_checkpoint(cached(name) or fetch(name, progress), name)
    raise ModelNotFound(
        f"{name} has no form for the engine mlx; expected a Hugging Face checkpoint: a folder with "
        "config.json and safetensors, or the hub name (owner/name) of one"
    )


def cached(name: str) -> Path | None:
    """The folder of a hub's checkpoint that is whole on this machine."""
    folder = hub.cached_snapshot(name, hub.CHECKPOINT)
    return folder if folder is not None and not any(_missing(folder)) else None


def fetch(name: str, progress: Progress) -> Path:
    """Download a checkpoint, or what is new in it; see `hub.fetch_snapshot`."""
    return hub.fetch_snapshot(name, progress, hub.CHECKPOINT)


def open_checkpoint(folder: Path, name: str) -> ModelFiles:
    """The checkpoint in `folder`, used where it is.

    Raises:
        ModelError: files are missing, or say nonsense.
    """
    missing = list(_missing(folder))
    if missing:
        raise ModelError(
            f"{folder} is not a whole Hugging Face checkpoint: {', '.join(missing)} missing"
        )
    facts, template = read_facts(folder), read_template(folder)
    return ModelFiles(name, folder, facts, _fingerprint(folder), template, str(folder), "mlx")


def _missing(folder: Path) -> Iterator[str]:
    yield from (name for name in (_CONFIG, TOKENIZER) if not (folder / name).is_file())
    if (folder / _INDEX).is_file():
        parts = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts.values()):
            raise ModelError(f"{folder / _INDEX} names no files of weights")
        yield from (name for name in sorted(set(parts.values())) if not (folder / name).is_file())
    elif not any(folder.glob("model*.safetensors")):
        yield "model.safetensors"


def _fingerprint(folder: Path) -> str:
    # Gigabytes to hash: names, sizes and times identify the weights.
    digest = hashlib.sha256()
    for path in [folder / _CONFIG, *sorted(folder.glob("model*.safetensors"))]:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
