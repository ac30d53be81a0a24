"""Conformance of every family: torch layers against transformers, on random tiny checkpoints.

A new family is a new entry of `support.coreml_families.FORMS`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch as safetensors_torch
import transformers

from paceline.errors import ModelError
from paceline_coreml.conversion.families import open_family
from support.coreml_families import (
    CAUSAL,
    LFM2,
    LFM2_MOE,
    LLAMA,
    LONGROPE,
    PHI3,
    PRIVACY_FILTER,
    ROWS,
    SLOTS,
    VOCAB,
    ZAYA,
    TinyModel,
    whole,
)
from support.coreml_torch import TorchModel

pytestmark = pytest.mark.coreml


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(request.param, tmp_path_factory.mktemp("checkpoint"))


causal = pytest.mark.parametrize("made", CAUSAL, indirect=True, scope="module")


@pytest.fixture
def network(made: TinyModel) -> TorchModel:
    return TorchModel(made.family(), rows=ROWS)


@pytest.fixture(scope="module")
def text() -> list[int]:
    return np.random.default_rng(0).integers(1, VOCAB, 40).tolist()


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


def run(network: TorchModel, tokens: Sequence[int], blocks: Callable[[int], int]) -> np.ndarray:
    """Logits of every token, with `blocks(number)` rows in each block."""
    found: list[np.ndarray] = []
    at = number = 0
    while at < len(tokens):
        block = tokens[at : at + blocks(number)]
        found.append(network.step(block).logits)
        network.keep(len(block))
        at, number = at + len(block), number + 1
    return np.concatenate(found)


@causal
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_logits_match_transformers_for_every_block_length(
    made: TinyModel, network: TorchModel, text: list[int], rows: int
):
    close(run(network, text[:23], lambda _: rows), made.logits(text[:23]))


@causal
def test_rejected_rows_leave_no_trace(made: TinyModel, network: TorchModel, text: list[int]):
    text = text[:23]
    expected = made.logits(text)
    at = number = 0
    while at < len(text):
        here = min((1, 2, 0, 3)[number % 4], len(text) - at)
        found = network.step([*text[at : at + here], *[7] * (ROWS - here)]).logits
        close(found[:here], expected[at : at + here])
        network.keep(here)
        at, number = at + here, number + 1


@causal
def test_a_forward_pass_may_be_padded(made: TinyModel, network: TorchModel, text: list[int]):
    expected = made.logits(text[:23])
    for token, logits in zip(text[:23], expected, strict=True):
        close(network.step([token], width=ROWS).logits[0], logits)
        network.keep(1)


@pytest.mark.parametrize(
    ("form", "factor"), [("privacy filter", 1.3466), ("privacy filter with default rope", 1)]
)
def test_the_attention_scaling_is_in_the_rope_tables(form: str, factor: float, tmp_path: Path):
    tables = TinyModel(form, tmp_path).family().rope_tables()
    assert tables[0].max() == pytest.approx(factor, abs=1e-4)


# --- configs and conversion

UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another activation": ("LlamaConfig", {**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "rope that depends on the length": (
        "LlamaConfig",
        {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic'.*'default' or 'linear'",
    ),
    "partial rope, where transformers has none": (
        "LlamaConfig",
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
        | {"partial_rotary_factor": 0.5},
        "partial_rotary_factor 0.5",
    ),
    "a window shorter than the longest text": (
        "Qwen3Config",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
        "sliding_window 40.*64 slots.*at most 40 slots",
    ),
    "layers of another type": (
        "Qwen3Config",
        {**LLAMA, "layer_types": ["full_attention", "full_attention", "chunked_attention"]},
        "layer_types .*chunked_attention",
    ),
    "longrope beyond its first set of frequencies": (
        "Phi3Config",
        {
            **{**PHI3, **whole(3, 1, 128), "rope_parameters": LONGROPE},
            "original_max_position_embeddings": SLOTS - 1,
        },
        "original_max_position_embeddings 63.*64 slots.*choose at most 63 slots",
    ),
    "dynamic without alpha": (
        "HunYuanDenseV1Config",
        {**LLAMA, "head_dim": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "alpha None",
    ),
    "no head size": ("HunYuanDenseV1Config", {**LLAMA, "head_dim": None}, "head_dim None"),
    "a convolution of one tap": ("Lfm2Config", {**LFM2, "conv_L_cache": 1}, "conv_L_cache 1"),
    "more experts than there are": (
        "Lfm2MoeConfig",
        {**LFM2_MOE, "num_experts_per_tok": 7},
        "num_experts_per_tok.*7.*num_experts, 6",
    ),
    **{
        f"zaya's {field}": ("ZayaConfig", {**ZAYA, field: value}, f"{field}.*expected")
        for field, value in (
            ("cca_time0", 3),
            ("cca_time1", 3),
            ("hidden_act", "gelu"),
            ("attention_bias", True),
            ("lm_head_bias", True),
        )
    },
    "zaya with a window": (
        "ZayaConfig",
        {**ZAYA, "layer_types": ["hybrid_sliding"] * ZAYA["num_hidden_layers"]}
        | {"sliding_window": 8},
        "layer_types.*expected",
    ),
    "a classifier without biases": (
        "OpenAIPrivacyFilterConfig",
        {**PRIVACY_FILTER, "attention_bias": False},
        "attention_bias.*expected",
    ),
}


@pytest.mark.parametrize("form", UNSUPPORTED)
def test_an_unsupported_core_ml_config_is_rejected(form: str, tmp_path: Path):
    name, settings, message = UNSUPPORTED[form]
    getattr(transformers, name)(**settings).save_pretrained(tmp_path)
    safetensors_torch.save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        open_family(tmp_path, slots=SLOTS, conv_slots=ROWS + 2)
