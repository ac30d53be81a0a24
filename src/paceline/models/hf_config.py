"""Reads a model's facts and chat template from the files that Hugging Face tools write.

Reads config.json, generation_config.json, tokenizer_config.json and tokenizer.json. These files
differ between exporters, so values of an unexpected type are ignored, not rejected.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.models.gguf.vocabulary import end_ids
from paceline.models.manifest import TEMPLATE, TOKENIZER, Facts
from paceline.models.tokenizer import Tokenizer
from paceline.storage.files import read_json


def read_facts(folder: Path) -> Facts:
    """Facts about the model in `folder`. Raises ModelError for unreadable files."""
    config = read_json(folder / "config.json")
    if isinstance(inner := config.get("text_config"), dict):
        config = inner
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
    """Chat template of the model in `folder`, from any of the files that may have it."""
    path = folder / TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = _optional(folder / name).get("chat_template")
        if isinstance(found, str):
            return found
        for each in found if isinstance(found, list) else ():  # named templates
            match each:
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
    """Token ids of a value that is one id, a list of ids, or anything else."""
    many = value if isinstance(value, list) else [value]
    return [each for each in many if isinstance(each, int) and not isinstance(each, bool)]


def _token_name(value: object) -> str | None:
    """Name of a token in tokenizer_config.json: a string, or the `content` of an object."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
