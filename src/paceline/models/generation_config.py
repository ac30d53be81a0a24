"""How a model's authors say that it should be sampled.

Knows `generation_config.json` as Hugging Face has it, and the `general.sampling.*` keys of GGUF
files, which are the same settings. The result has the names of `paceline.Options`. Knows nothing of
ranges, which are checked where they are used. The rule: what a file does not say is not made up.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.storage.files import read_json, write_json

GENERATION = "generation_config.json"

Settings = Mapping[str, float | int]
"""Name of an option -> its value."""

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Key of generation_config.json -> our name. These are the ones that vLLM honours."""

_WHOLE = ("top_k", "max_tokens")

_GGUF = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""The end of a `general.sampling.` key -> the key of generation_config.json that it was made of."""


def read_generation_config(folder: Path) -> Settings:
    """What the model in `folder` says; empty where it has no generation_config.json.

    `do_sample: false` is a temperature of 0, whatever temperature is beside it, and
    `do_sample: true` without one is 1, as in transformers. Raises ModelError for values that are no
    numbers.
    """
    path = folder / GENERATION
    if not path.exists():
        return {}
    said = read_json(path)
    found = {
        ours: _number(path, theirs, said[theirs])
        for theirs, ours in _NAMES.items()
        if said.get(theirs) is not None
    }
    if found.get("top_k", 0) < 0:
        found["top_k"] = 0  # -1 is another way to say off
    sample = said.get("do_sample")
    if sample is False:
        found["temperature"] = 0.0
    elif sample is True:
        found.setdefault("temperature", 1.0)
    return found


def write_gguf_settings(fields: Mapping[str, Any], folder: Path) -> None:
    """Write what a GGUF file's metadata say as the generation_config.json of `folder`.

    The file is written also when they say nothing: without it, they would be read again.
    """
    write_json(folder / GENERATION, from_gguf(fields))


def from_gguf(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a generation_config.json that a GGUF file's metadata stand for."""
    found = {
        theirs: value
        for key, theirs in _GGUF.items()
        if _is_number(value := fields.get(f"general.sampling.{key}"))
    }
    if fields.get("general.sampling.penalty_last_n") == 0:
        found.pop("repetition_penalty", None)  # over no tokens
    # f32 in the file: 0.9 is 0.8999999761581421 there.
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in found.items()}


def _number(path: Path, name: str, value: Any) -> float | int:
    whole = _NAMES[name] in _WHOLE
    if not _is_number(value) or (whole and value != int(value)):
        raise ModelError(
            f"{path} has {name} {value!r}; expected a {'whole ' if whole else ''}number. Mend it, "
            "or go without it with --generation-config none"
        )
    return int(value) if whole else float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
