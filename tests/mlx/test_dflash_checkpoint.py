"""Reading DFlash checkpoints: config.json, weights and the tokens to draft."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ModelError
from paceline_mlx.heads.config import Llama3Rope
from paceline_mlx.heads.dflash.checkpoint import Config, read_tensors
from paceline_mlx.heads.dflash.config_file import read_config
from support.dflash import LEFT_OUT, config_json, tiny_config, write_checkpoint, write_config
from support.errors import raises
from support.networks import Case

pytestmark = pytest.mark.mlx


@pytest.fixture
def config() -> Config:
    return tiny_config()


@pytest.fixture
def checkpoint(config: Config, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, config)
    return tmp_path


def rejection(folder: Path, config: Config, **change: Any) -> str:
    """The message for a config.json with these changes."""
    values = {**config_json(config), **change}
    write_config(folder, {name: value for name, value in values.items() if value is not LEFT_OUT})
    with pytest.raises(ModelError) as error:
        read_config(folder)
    return str(error.value)


def test_a_config_is_read_as_written(config: Config, tmp_path: Path):
    config = replace(config, num_hidden_layers=3, windows=(None, 7, 7), rms_norm_eps=0.01)
    write_checkpoint(tmp_path, config)
    assert read_config(tmp_path) == config


def test_optional_fields_have_defaults(config: Config, tmp_path: Path):
    left_out = ("head_dim", "rms_norm_eps", "rope_theta", "layer_types", "hidden_act")
    write_checkpoint(tmp_path, config, change=dict.fromkeys(left_out, LEFT_OUT))
    expected = replace(config, rms_norm_eps=1e-6, rope_theta=10_000.0)
    assert read_config(tmp_path) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("hidden_size", LEFT_OUT), ("vocab_size", None), ("block_size", "8"), ("block_size", 1)),
        *(("num_hidden_layers", 0), ("num_target_layers", True), ("head_dim", 31)),
        *(("architectures", []), ("architectures", 3), ("rms_norm_eps", -1.0)),
        *(("layer_types", ["chunked_attention"]), ("rope_theta", float("nan"))),
        *(("rope_scaling", {"type": "linear", "factor": 2.0}), ("dflash_config", LEFT_OUT)),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ],
    ids=repr,
)
def test_an_invalid_value_is_named(config: Config, tmp_path: Path, name: str, value: Any):
    assert f"config.json: {name}" in rejection(tmp_path, config, **{name: value})


def test_all_faults_are_named_at_once(config: Config, tmp_path: Path):
    message = rejection(
        tmp_path,
        config,
        architectures=["Qwen3ForCausalLM"],
        hidden_size=LEFT_OUT,
        block_size=1,
        dflash_config={"target_layer_ids": [], "mask_token_id": None},
        rope_scaling={"rope_type": "yarn", "factor": 4.0},
        attention_bias=True,
        hidden_act="gelu",
    )
    for fault in (
        str(tmp_path / "config.json"),
        "'Qwen3ForCausalLM'",
        "hidden_size: ",
        "block_size: ",
        "dflash_config.target_layer_ids: ",
        "dflash_config.mask_token_id: ",
        "rope_scaling.rope_type: Input should be 'default' or 'llama3', not 'yarn'",
        "attention_bias: ",
        "'gelu'",
    ):
        assert fault in message


def test_all_contradictions_are_named_at_once(config: Config, tmp_path: Path):
    message = rejection(
        tmp_path,
        config,
        num_attention_heads=4,
        num_key_value_heads=3,
        dflash_config={"target_layer_ids": [0, 2], "mask_token_id": 320},
        layer_types=["sliding_attention"],
        sliding_window=None,
    )
    for fault in (
        "num_attention_heads is no multiple of num_key_value_heads",
        "layer 2 is tapped, the target has 2",
        "mask_token_id is 320, the vocabulary has 320 tokens",
        "layer_types has 1 entries, not 2",
        "sliding_window is None",
    ):
        assert fault in message


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""As in the drafters for Llama 3.1."""


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3"},
        {**LLAMA3, "low_freq_factor": 4.0},
        {**LLAMA3, "original_max_position_embeddings": None},
    ],
    ids=repr,
)
def test_an_incomplete_scaling_is_rejected(config: Config, tmp_path: Path, rope: Any):
    assert "RoPE" in rejection(tmp_path, config, rope_scaling=rope)


def test_the_rope_parameters_of_transformers_5_are_read(config: Config, tmp_path: Path):
    new = {"rope_type": "default", "rope_theta": 2000.0}
    change = {"rope_theta": LEFT_OUT, "rope_scaling": LEFT_OUT, "rope_parameters": new}
    write_checkpoint(tmp_path, config, change=change)
    assert read_config(tmp_path) == replace(config, rope_theta=2000.0)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": LEFT_OUT},
    ],
)
def test_the_scaling_of_llama_3_is_read(config: Config, tmp_path: Path, change: Any):
    config = replace(config, rope_theta=5e5)
    write_checkpoint(tmp_path, config, change=change)
    assert read_config(tmp_path) == replace(config, llama3_rope=Llama3Rope(8.0, 1.0, 4.0, 8192))


@pytest.mark.reference
def test_frequencies_are_those_of_transformers():
    scaling = Llama3Rope(8.0, 1.0, 4.0, 8192)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(head_dim=128, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    np.testing.assert_allclose(1 / scaling.periods(128, 5e5), expected, rtol=1e-6)


def test_a_window_counts_only_for_layers_that_slide(config: Config, tmp_path: Path):
    write_checkpoint(tmp_path, config, change={"sliding_window": 5})
    assert read_config(tmp_path).windows == (None, None)
    kinds = ["full_attention", "sliding_attention"]
    write_checkpoint(tmp_path, config, change={"sliding_window": 5, "layer_types": kinds})
    assert read_config(tmp_path).windows == (None, 5)


def test_a_folder_without_a_config_is_rejected(tmp_path: Path):
    with raises(ModelError, "config.json"):
        read_config(tmp_path / "nothing")


def read_weights(folder: Path, config: Config) -> dict[str, np.ndarray]:
    import mlx.core as mx

    tensors, _ = read_tensors(folder, config)
    return {name: np.array(one.load().astype(mx.float32)) for name, one in tensors.items()}


@pytest.mark.parametrize(
    "written", [{"kind": "BF16"}, {"kind": "F16"}, {"prefix": "model."}, {"files": 3}], ids=repr
)
def test_weights_are_read_as_written(config: Config, tmp_path: Path, written: Any):
    more = {"embed_tokens.weight": np.ones((320, 64), np.float32)}  # not the drafter's
    expected = write_checkpoint(tmp_path, config, tensors=more, **written)
    del expected["embed_tokens.weight"]
    weights = read_weights(tmp_path, config)
    assert weights.keys() == expected.keys()
    for name, rows in expected.items():
        assert np.array_equal(weights[name], rows), name


def test_all_faulty_tensors_are_named_at_once(config: Config, tmp_path: Path):
    endless = np.full((64,), np.inf, np.float32)
    write_checkpoint(
        tmp_path,
        config,
        tensors={
            "fc.weight": LEFT_OUT,
            "hidden_norm.weight": np.full((64,), np.nan, np.float32),
            "layers.0.input_layernorm.weight": endless,
            "layers.1.self_attn.q_proj.weight": np.ones((3, 64), np.float32),
            "layers.1.mlp.down_proj.weight": np.ones((192, 64), np.float32),
        },
    )
    with pytest.raises(ModelError) as error:
        read_weights(tmp_path, config)
    message = str(error.value)
    for fault in (
        str(tmp_path),
        "fc.weight is missing",
        "hidden_norm.weight has values that are not finite",
        "layers.0.input_layernorm.weight has values that are not finite",
        "layers.1.self_attn.q_proj.weight is [3, 64], expected [64, 64]",
        "layers.1.mlp.down_proj.weight is [192, 64], expected [64, 192]",
    ):
        assert fault in message
    assert "more" not in message


def test_five_faulty_tensors_are_named_and_the_rest_counted(config: Config, tmp_path: Path):
    write_checkpoint(tmp_path, config)
    deeper = replace(config, num_hidden_layers=4, windows=(None,) * 4)
    with raises(ModelError, "layers.2.", "17 more"):
        read_weights(tmp_path, deeper)


def test_weights_of_another_dtype_are_rejected(config: Config, tmp_path: Path):
    write_checkpoint(tmp_path, config, kind="F64")
    with raises(ModelError, "F64"):
        read_weights(tmp_path, config)


def test_a_folder_without_weights_is_rejected(config: Config, tmp_path: Path):
    with raises(ModelError, ".safetensors"):
        read_weights(tmp_path, config)


@pytest.mark.parametrize("end", [0, 4, 100, -1])
def test_a_truncated_file_is_rejected(checkpoint: Path, config: Config, end: int):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:end])
    with raises(ModelError, "model.safetensors"):
        read_weights(checkpoint, config)


def test_a_drafter_for_another_target_is_rejected_before_its_weights_are_read(
    case: Case, tmp_path: Path
):
    sizes = {"hidden_size": 576, "num_target_layers": 30, "vocab_size": 49152}
    write_config(tmp_path, config_json(replace(case.config, **sizes)))
    faults = ["hidden size is 576, the target's 64", "layers is 30", "vocabulary is 49152"]
    with raises(ModelError, "another target", *faults):
        case.opened(tmp_path)
