"""The registry of model families."""

from importlib import import_module
from pathlib import Path

from paceline.errors import InvalidRequest, ModelError
from paceline_coreml.conversion.checkpoint import CONFIG, damage_reported, read_checkpoint
from paceline_coreml.conversion.family import Family

FAMILIES = {
    "llama": "llama.llama",
    "qwen3": "llama.qwen3",
    "phi3": "llama.phi3",
    "hunyuan_v1_dense": "llama.hunyuan",
    "lfm2": "lfm2.lfm2",
    "lfm2_moe": "lfm2.lfm2",
    "zaya": "zaya.Zaya",
    "openai_privacy_filter": "privacy_filter.PrivacyFilter",
}
"""The config's `model_type` -> module, and class or function that builds the `Family`."""

ROUTINGS = {"zaya": ("top-1", "soft")}
"""Family -> supported routings, if there are others than the trained one."""


def open_family(folder: Path, *, slots: int, conv_slots: int, routing: str | None = None) -> Family:
    """Open the checkpoint in `folder`; `routing` is one of `ROUTINGS`, or None for the trained one.

    Raises:
        ModelError: the folder cannot be read, or its family is not supported.
        InvalidRequest: the family does not support this routing.
    """
    config, weights = read_checkpoint(folder)
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"unsupported family {config.model_type!r} in {folder}; expected one of "
            f"{', '.join(FAMILIES)}"
        )
    known = ROUTINGS.get(config.model_type, ())
    if routing is not None and routing not in known:
        raise InvalidRequest(
            f"routing is {routing!r}; expected {' or '.join(known) or 'none'} for the family "
            f"{config.model_type!r}"
        )
    chosen = {} if routing is None else {"routing": routing}
    file, _, name = FAMILIES[config.model_type].partition(".")
    with damage_reported(str(folder / CONFIG)):
        family: Family = getattr(import_module(f"{__name__}.{file}"), name)(
            config, weights, slots=slots, conv_slots=conv_slots, **chosen
        )
        weights.expect_model(config)
    return family
