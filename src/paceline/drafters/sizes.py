"""Sizes of a target, by which a drafter is known to be one of its own."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ModelError
from paceline.storage.files import read_json
from paceline.storage.gguf_file import read_gguf


class Sizes(NamedTuple):
    architecture: str
    layers: int
    """Without those that draft."""
    width: int
    vocabulary: int


def sizes_of(path: Path) -> tuple[Sizes, str]:
    """Sizes of a GGUF file or a checkpoint's folder, and what its files call the model.

    Raises ModelError if they do not say.
    """
    if path.is_dir():
        config = read_json(path / "config.json")
        inner = config.get("text_config")
        config = inner if isinstance(inner, dict) else config
        keys = ("num_hidden_layers", "hidden_size", "vocab_size")
        return _sizes(path, config.get("model_type"), *map(config.get, keys)), path.name
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return _of_gguf(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)
def _of_gguf(path: Path, _changed: int, _bytes: int) -> tuple[Sizes, str]:
    fields = read_gguf(path).fields
    family = fields.get("general.architecture")
    keys = ("block_count", "embedding_length")
    tokens = fields.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    sizes = _sizes(path, family, *(fields.get(f"{family}.{key}") for key in keys), count)
    drafting = fields.get(f"{family}.nextn_predict_layers")
    layers = sizes.layers - drafting if isinstance(drafting, int) else sizes.layers
    names = ("general.name", "general.basename", "general.base_model.0.repo_url")
    return sizes._replace(layers=layers), " ".join(str(fields.get(name, "")) for name in names)


def _sizes(path: Path, family: object, *counts: object) -> Sizes:
    if not isinstance(family, str) or not all(isinstance(n, int) and n > 0 for n in counts):
        raise ModelError(
            f"{path} is {family!r} of {', '.join(map(str, counts))} layers, width and tokens; "
            "expected a name and numbers: fetch it again"
        )
    return Sizes(family, *counts)  # type: ignore[arg-type]
