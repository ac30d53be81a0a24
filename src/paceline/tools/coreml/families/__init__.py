"""Which families there are: one readable file each."""

from importlib import import_module
from pathlib import Path

from paceline.errors import InvalidRequest, ModelError
from paceline.tools.coreml.checkpoint import read_checkpoint
from paceline.tools.coreml.family import Family

FAMILIES = {
    "llama": "llama.llama",
    "qwen3": "qwen3.qwen3",
    "phi3": "phi3.phi3",
    "hunyuan_v1_dense": "hunyuan.hunyuan",
    "lfm2": "lfm2.lfm2",
    "lfm2_moe": "lfm2.lfm2_moe",
    "zaya": "zaya.Zaya",
    "openai_privacy_filter": "privacy_filter.PrivacyFilter",
}
"""`model_type` of a config.json -> file and what opens it there, as `Family` is made."""

ROUTINGS = {"zaya": ("top-1", "soft")}
"""Families that can give rows other experts than their models were trained with: see each."""


def open_family(folder: Path, *, slots: int, ring: int, routing: str | None = None) -> Family:
    """The model of a checkpoint's folder; `routing` one of `ROUTINGS`, or None: as trained.

    Raises:
        ModelError: the folder cannot be read, or is of a family that is not here.
        InvalidRequest: the family has no such routing.
    """
    config, weights = read_checkpoint(folder)
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"{folder} is of the family {config.model_type!r}; "
            f"expected one of {', '.join(FAMILIES)}"
        )
    known = ROUTINGS.get(config.model_type, ())
    if routing is not None and routing not in known:
        raise InvalidRequest(
            f"routing is {routing!r}; expected {' or '.join(known) or 'none'} for the family "
            f"{config.model_type!r}"
        )
    chosen = {} if routing is None else {"routing": routing}
    file, _, name = FAMILIES[config.model_type].partition(".")
    made: Family = getattr(import_module(f"{__name__}.{file}"), name)(
        config, weights, slots=slots, ring=ring, **chosen
    )
    return made
