"""Facts about a model from the files that Hugging Face tools put beside its weights.

Knows config.json, generation_config.json, tokenizer_config.json and where chat templates are kept.
Knows nothing about graphs. The rule: what the files say wins over what is usual.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.models.manifest import TEMPLATE, TOKENIZER, Facts
from paceline.models.tokenizer import Tokenizer
from paceline.storage.files import read_json

END_NAMES = frozenset(
    [
        "</s>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<EOT>",
    ]
)
"""Control tokens that end an answer in the model families that use them."""


def read_facts(folder: Path) -> Facts:
    """The facts about the model in `folder`. Raises ModelError for files that say nonsense."""
    config = read_json(folder / "config.json")
    words = _optional(folder / "tokenizer_config.json")
    generation = _optional(folder / "generation_config.json")
    tokenizer = Tokenizer(folder / TOKENIZER)
    inner = config.get("text_config")
    text_config = inner if isinstance(inner, dict) else config
    bos_token, eos_token = _token_name(words.get("bos_token")), _token_name(words.get("eos_token"))
    if bos_token is not None:
        bos_id = tokenizer.token_id(bos_token)
    else:
        said = _ids(generation.get("bos_token_id")) or _ids(text_config.get("bos_token_id"))
        bos_id = said[0] if said else None
    stops = {
        *_ids(generation.get("eos_token_id")),
        *_ids(text_config.get("eos_token_id")),
        *_ids(tokenizer.token_id(eos_token) if eos_token is not None else None),
        *end_ids(tokenizer.special_tokens()),
    }
    asked = words.get("add_bos_token")
    if not isinstance(asked, bool):  # then the tokenizer's own file decides
        asked = bos_id is not None and tokenizer.begins_with(bos_id)
    return Facts(
        context_length=_context_length(folder, text_config),
        stop_token_ids=tuple(sorted(stops)),
        bos_token_id=bos_id,
        add_bos=asked and bos_id is not None,
        bos_token=bos_token,
        eos_token=eos_token,
        license=None,
    )


def read_template(folder: Path) -> str | None:
    """The chat template of the model in `folder`, from whichever place it is kept in."""
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
        if isinstance(found, list):  # several, by name
            named = {each.get("name"): each.get("template") for each in found if _is_map(each)}
            if isinstance(default := named.get("default"), str):
                return default
    return None


def end_ids(special: Mapping[str, int]) -> set[int]:
    """The ids of the control tokens that end an answer, by their usual names."""
    return {number for name, number in special.items() if name in END_NAMES}


def _context_length(folder: Path, config: Mapping[str, Any]) -> int:
    for key in ("max_position_embeddings", "n_positions", "seq_length"):
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(
        f"{folder / 'config.json'} does not say the context length: expected "
        "max_position_embeddings, a number of tokens"
    )


def _ids(value: object) -> list[int]:
    """Token ids as the files give them: one, several or none."""
    many = value if isinstance(value, list) else [value]
    return [each for each in many if isinstance(each, int) and not isinstance(each, bool)]


def _token_name(value: object) -> str | None:
    """A token as tokenizer_config.json gives it: its name, or an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _is_map(value: object) -> bool:
    return isinstance(value, dict)


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
