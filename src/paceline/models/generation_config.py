"""Sampling settings of a model's authors, under the names of `paceline.Options`.

Reads `generation_config.json` and the same settings in GGUF metadata (`general.sampling.*`).
Ranges are checked where the settings are used. Invariant: missing settings have no default here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.errors import ModelError
from paceline.models.manifest import GENERATION, Settings
from paceline.storage.files import read_json
from paceline.storage.validation import Limit, validated

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Key of generation_config.json -> option. vLLM reads the same keys."""

_Number = Annotated[float, Limit(gt=-(10**9), lt=10**9)]
_Integer = Annotated[float, Limit(gt=-(10**9), lt=10**9, multiple_of=1)]
"""20.0 is one too."""


@dataclass(frozen=True, slots=True)
class _Config:
    """The keys of `_NAMES`."""

    temperature: _Number | None = None
    top_p: _Number | None = None
    top_k: _Integer | None = None
    min_p: _Number | None = None
    repetition_penalty: _Number | None = None
    max_new_tokens: _Integer | None = None


def read_generation_config(folder: Path) -> Settings:
    """Settings in the generation_config.json of `folder`; empty where there is no file.

    `do_sample: false` is temperature 0, whatever the file's temperature; `do_sample: true` without
    a temperature is 1, as in transformers. Raises ModelError for values that are not numbers.
    """
    path = folder / GENERATION
    if not path.exists():
        return {}
    value = read_json(path)
    try:
        config = validated(_Config, value, str(path), error=ModelError)
    except ModelError as error:
        hint = "correct it, or ignore the file with --generation-config none"
        raise ModelError(f"{error}; {hint}") from error
    found: dict[str, float | int] = {
        option: number
        for key, option in _NAMES.items()
        if (number := getattr(config, key)) is not None
    }
    for option in found.keys() & {"top_k", "max_tokens"}:
        found[option] = int(found[option])
    if found.get("top_k", 0) < 0:
        found["top_k"] = 0  # -1 also means off
    sample = value.get("do_sample")
    if sample is False:
        found["temperature"] = 0.0
    elif sample is True:
        found.setdefault("temperature", 1.0)
    return found
