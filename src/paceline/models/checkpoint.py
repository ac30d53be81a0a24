"""Opens Hugging Face checkpoints without converting them, for the engine `mlx`."""

import importlib.util
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import ModelError
from paceline.models import hub
from paceline.models.files import ONLY_SAFETENSORS, ModelFiles, stat_fingerprint
from paceline.models.hf_config import read_facts, read_template
from paceline.models.manifest import GRAPH, TOKENIZER
from paceline.storage.files import read_json

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"


def mlx_available() -> bool:
    """Whether checkpoints run here unconverted: on Apple Silicon, with mlx-lm installed."""
    apple_silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return apple_silicon and importlib.util.find_spec("mlx_lm") is not None


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a checkpoint and no OpenVINO model."""
    weights = any(folder.glob("model*.safetensors"))
    return weights and (folder / _CONFIG).is_file() and not (folder / GRAPH).exists()


def cached(name: str, revision: str | None = None) -> Path | None:
    """Folder of a hub checkpoint that is complete on this machine."""
    folder = hub.cached_snapshot(name, hub.CHECKPOINT, revision=revision)
    return folder if folder is not None and not any(_missing(folder)) else None


def open_checkpoint(folder: Path, name: str) -> ModelFiles:
    """Open the checkpoint in `folder`, without copying it.

    Raises ModelError if files are missing or invalid.
    """
    check_complete(folder)
    facts, template = read_facts(folder), read_template(folder)
    fingerprint = stat_fingerprint([folder / _CONFIG, *sorted(folder.glob("model*.safetensors"))])
    return ModelFiles(name, folder, facts, fingerprint, template, str(folder), "mlx")


def check_complete(folder: Path) -> None:
    """Raise ModelError, which names the missing files, for an incomplete checkpoint."""
    if missing := list(_missing(folder)):
        fault = f"not a complete Hugging Face checkpoint: {', '.join(missing)} missing"
        has_others = _WEIGHTS in missing and _CONFIG not in missing
        raise ModelError(f"{folder} is {fault}" + f"; {ONLY_SAFETENSORS}" * has_others)


def _missing(folder: Path) -> Iterator[str]:
    yield from (name for name in (_CONFIG, TOKENIZER) if not (folder / name).is_file())
    if (folder / _INDEX).is_file():
        parts = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(parts, dict) or not all(isinstance(name, str) for name in parts.values()):
            raise ModelError(f"{folder / _INDEX} lists no weight files")
        yield from (name for name in sorted(set(parts.values())) if not (folder / name).is_file())
    elif not any(folder.glob("model*.safetensors")):
        yield _WEIGHTS
