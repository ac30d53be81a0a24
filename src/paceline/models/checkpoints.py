"""Hugging Face checkpoints: completeness checks and metadata.

Facts, settings and chat template are read from config.json, generation_config.json,
tokenizer_config.json and tokenizer.json. These files differ between exporters, so values of an
unexpected type are ignored, not rejected. Sampling settings, which users see, are rejected.
Ranges of settings are checked where they are used.

Invariant: this module sets no defaults for missing settings.
"""

import importlib.util
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from paceline.errors import ModelError
from paceline.models import hub
from paceline.models.gguf.vocabulary import end_ids
from paceline.models.manifest import GENERATION, TEMPLATE, TOKENIZER, Facts, Settings
from paceline.models.templates.tokenizer import Tokenizer
from paceline.storage.files import read_json, read_text, read_text_config
from paceline.storage.validation import Limit, validated

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"

ONLY_SAFETENSORS = (
    "a checkpoint's weights must be safetensors: use another revision or repository of the model, "
    "or a GGUF file (owner/name:Q4_K_M on the Hugging Face Hub)"
)
"""Advice for weights in PyTorch's own format, as the end of a sentence."""

_Number = Annotated[float, Limit(gt=-(10**9), lt=10**9)]
_Integer = Annotated[float, Limit(gt=-(10**9), lt=10**9, multiple_of=1)]
"""An integer, also if written as 20.0."""


def mlx_available() -> bool:
    """Return whether checkpoints run unconverted: on Apple Silicon, with mlx-lm installed."""
    apple_silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return apple_silicon and importlib.util.find_spec("mlx_lm") is not None


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a checkpoint's configuration and weights."""
    return any(folder.glob("model*.safetensors")) and (folder / _CONFIG).is_file()


def cached(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a complete checkpoint in the Hugging Face cache, or None."""
    folder = hub.cached_snapshot(name, hub.CHECKPOINT.required, revision=revision)
    return folder if folder is not None and not any(_missing(folder)) else None


def check_complete(folder: Path) -> None:
    """Raise ModelError, naming the missing files, for an incomplete checkpoint."""
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


@dataclass(frozen=True, slots=True)
class _Generation:
    """Keys of generation_config.json that paceline supports; vLLM reads the same."""

    temperature: _Number | None = None
    top_p: _Number | None = None
    top_k: _Integer | None = None
    min_p: _Number | None = None
    repetition_penalty: _Number | None = None
    max_new_tokens: _Integer | None = None


def read_generation_config(folder: Path) -> Settings:
    """Read the settings in the generation_config.json of `folder`; empty without a file.

    `do_sample: false` is temperature 0, whatever the file's temperature; `do_sample: true` without
    a temperature is 1, as in transformers. Raises ModelError for values that are not numbers.
    """
    path = folder / GENERATION
    if not path.exists():
        return {}
    value = read_json(path)
    try:
        config = validated(_Generation, value, str(path), error=ModelError)
    except ModelError as error:
        hint = "correct it, or ignore the file with --generation-config none"
        raise ModelError(f"{error}; {hint}") from error
    settings: dict[str, float | int] = {
        key: number for key, number in asdict(config).items() if number is not None
    }
    if "max_new_tokens" in settings:
        settings["max_tokens"] = int(settings.pop("max_new_tokens"))
    if "top_k" in settings:
        settings["top_k"] = max(int(settings["top_k"]), 0)  # -1 also means off
    sample = value.get("do_sample")
    if sample is False:
        settings["temperature"] = 0.0
    elif sample is True:
        settings.setdefault("temperature", 1.0)
    return settings


def read_facts(folder: Path) -> Facts:
    """Read the facts about the model in `folder`. Raises ModelError for unreadable files."""
    config = read_text_config(folder)
    generation = _optional(folder / "generation_config.json")
    settings = _optional(folder / "tokenizer_config.json")
    tokenizer = Tokenizer(folder / TOKENIZER)
    bos_token, eos_token = (_token_name(settings.get(name)) for name in ("bos_token", "eos_token"))
    if bos_token is not None:
        bos_id = tokenizer.token_id(bos_token)
    else:
        ids = _ids(generation.get("bos_token_id")) or _ids(config.get("bos_token_id"))
        bos_id = ids[0] if ids else None
    stops = {
        *_ids(generation.get("eos_token_id")),
        *_ids(config.get("eos_token_id")),
        *_ids(tokenizer.token_id(eos_token) if eos_token is not None else None),
        *end_ids(tokenizer.special_tokens()),
    }
    add_bos = settings.get("add_bos_token")
    if not isinstance(add_bos, bool):  # then tokenizer.json decides
        add_bos = bos_id is not None and tokenizer.begins_with(bos_id)
    return Facts(
        context_length=_context_length(folder, config),
        stop_token_ids=tuple(sorted(stops)),
        bos_token_id=bos_id,
        add_bos=add_bos and bos_id is not None,
        bos_token=bos_token,
        eos_token=eos_token,
        license=None,
    )


def read_template(folder: Path) -> str | None:
    """Return the chat template of the model in `folder`, from any file that may contain it."""
    path = folder / TEMPLATE
    if path.is_file():
        return read_text(path)
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _optional(folder / name).get("chat_template")
        if isinstance(template, str):
            return template
        for entry in template if isinstance(template, list) else ():  # named templates
            match entry:
                case {"name": "default", "template": str(default)}:
                    return default
    return None


def _context_length(folder: Path, config: Mapping[str, Any]) -> int:
    for key in ("max_position_embeddings", "n_positions", "seq_length"):
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(
        f"{folder / 'config.json'} has no context length: expected "
        "max_position_embeddings, a number of tokens"
    )


def _ids(value: object) -> list[int]:
    """Return the token ids of a value that is one id, a list of ids, or anything else."""
    ids = value if isinstance(value, list) else [value]
    return [token for token in ids if isinstance(token, int) and not isinstance(token, bool)]


def _token_name(value: object) -> str | None:
    """Return a token's name in tokenizer_config.json: a string, or the `content` of an object."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
