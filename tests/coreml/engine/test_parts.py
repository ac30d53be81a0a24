from pathlib import Path
from typing import Any

import pytest

from paceline_coreml.engine.parts import part_of, trace
from paceline_coreml.rehearsal.ops import OPS
from paceline_coreml.rehearsal.program import read_package


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers_0_mix_q_weight_to_fp16_quantized", "attention"),
        ("layers_12_mix_o_weight_to_fp16", "attention"),
        ("layers_0_mix_q_norm_weight_to_fp16", "attention"),
        ("layers_0_mix_attention_k_state", "attention"),
        ("layers_3_attention_convolve_second_now_bias_to_fp16", "attention"),
        ("layers_3_attention_recent_ring", "attention"),
        ("layers_0_attention_sinks_to_fp16", "attention"),
        ("layers_0_mix_out_weight_to_fp16", "convolution"),
        ("layers_0_mix_x_weight_to_fp16_palettized", "convolution"),
        ("layers_0_mix_window_ring", "convolution"),
        ("layers_1_feed_forward_gate_weight_to_fp16", "feed-forward"),
        ("layers_1_feed_forward_router_weight_to_fp16", "router"),
        ("layers_1_feed_forward_bias_to_fp16", "router"),
        ("layers_1_router_biases_to_fp16", "router"),
        ("layers_1_feed_forward_experts_gates_1_weight_to_fp16", "experts"),
        ("layers_1_experts_down_bias_weight_to_fp16", "experts"),
        ("layers_1_before_weight_to_fp16", "rest"),
        ("layers_1_merge_experts_old_scale_to_fp16", "rest"),
        ("final_weight_to_fp16", "head"),
        ("head_weight_to_fp16_quantized", "head"),
        ("var_12", None),
        ("hidden", None),
    ],
)
def test_a_name_says_which_part_it_is_of(name: str, part: str | None):
    assert part_of(name) == part


COMMON = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
LFM2_MOE = {
    **COMMON,
    "intermediate_size": 64,
    "layer_types": ["conv", "full_attention"],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
PRIVACY_FILTER = {
    **COMMON,
    "intermediate_size": 32,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "num_labels": 3,
    "pad_token_id": 0,
    "eos_token_id": 0,
}


@pytest.mark.coreml
@pytest.mark.parametrize(
    ("config", "model", "settings", "parts", "experts"),
    [
        (
            "Lfm2MoeConfig",
            "Lfm2MoeForCausalLM",
            LFM2_MOE,
            {"attention", "convolution", "feed-forward", "router", "experts"},
            {1: 1},
        ),
        (
            "OpenAIPrivacyFilterConfig",
            "OpenAIPrivacyFilterForTokenClassification",
            PRIVACY_FILTER,
            {"attention", "router", "experts"},
            {0: 1, 1: 1},
        ),
    ],
    ids=["lfm2_moe", "privacy filter"],
)
def test_whatever_multiplies_has_a_part_of_its_own(
    quiet_coremltools: None,
    tmp_path: Path,
    config: str,
    model: str,
    settings: dict[str, Any],
    parts: set[str],
    experts: dict[int, int],
):
    transformers = pytest.importorskip("transformers", minversion="5.23")
    from paceline_coreml.conversion.families import open_family
    from paceline_coreml.conversion.shards import Sizes, convert_layers

    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    made.save_pretrained(tmp_path / "checkpoint")
    family = open_family(tmp_path / "checkpoint", slots=32, conv_slots=16)
    program = convert_layers(family, 0, 2, sizes=Sizes(rows=4, slots=32, conv_slots=16))
    program.save(str(tmp_path / "layers.mlpackage"))
    block = read_package(tmp_path / "layers.mlpackage").function(None).block
    traced = trace(block)
    multiply = {traced.parts[op.name] for op in block.ops if OPS[op.type].macs}
    assert multiply == parts
    assert {layer: len(values) for layer, values in traced.shares.items()} == experts
