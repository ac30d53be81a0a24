"""Reading heads of `mtp`: both forms, their files, and every fault in one clear message."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.drafters import shipped
from paceline.errors import ModelError
from paceline_mlx.heads.mtp.network import HeadNetwork
from paceline_mlx.heads.mtp.qwen3_5 import has_head
from paceline_mlx.heads.mtp.read import read_config, read_head
from support.dflash import LEFT_OUT
from support.errors import raises
from support.mtp import HeadForm, write_head
from support.networks import MlxEnds

pytestmark = pytest.mark.mlx

EAGLE = HeadForm(drafted=range(5, 300, 3))
OWN = HeadForm(own=True, taps=(1,), kv_heads=1, rotary=0.5)


def two() -> int:
    return 2


def floats(array: Any) -> np.ndarray:
    import mlx.core as mx

    return np.array(array.astype(mx.float32))


def rejection(folder: Path, form: HeadForm, **more: Any) -> str:
    """The one-line message for a head with these changes."""
    write_head(folder, form, **more)
    with pytest.raises(ModelError) as error:
        read_head(folder, two)
    return str(error.value)


# -- EAGLE-3 ---------------------------------------------------------------------------------------

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("change", "layers", "taps"),
    [
        ({"eagle_config": LEFT_OUT}, 30, (1, 14, 26)),
        ({"eagle_config": {}}, 32, (1, 15, 28)),
        ({"eagle_config": {IDS: [0, 3, 5]}}, 8, (0, 3, 5)),
        ({"eagle_config": LEFT_OUT, IDS: [1, 4, 6]}, 8, (0, 3, 5)),
    ],
)
def test_taps_are_those_of_vllm_and_sglang(
    tmp_path: Path, change: dict[str, Any], layers: int, taps: tuple[int, ...]
):
    write_head(tmp_path, EAGLE, change=change)
    assert read_config(tmp_path, lambda: layers).taps == taps


def test_a_head_of_deepspec_names_its_target(tmp_path: Path):
    form = HeadForm(deepspec=True)
    copies = {"lm_head.weight": np.ones((320, 64)), "embed_tokens.weight": np.ones((320, 64))}
    write_head(tmp_path, form, tensors=copies)
    config = read_config(tmp_path, two)
    assert (config.taps, config.num_target_layers, config.draft_vocab_size) == ((0, 1), 2, None)
    assert read_head(tmp_path, two).weights.head is None
    assert "target_layer_ids is missing" in rejection(
        tmp_path, form, change={"target_layer_ids": LEFT_OUT}
    )
    assert "layers.0.self_attn.q_norm" in rejection(
        tmp_path, form, tensors={"layers.0.self_attn.q_norm.weight": LEFT_OUT}
    ).replace("midlayer.", "layers.0.")


def test_a_target_too_short_for_the_usual_taps_is_named(tmp_path: Path):
    assert "a target of 2 layers is too short" in rejection(
        tmp_path, EAGLE, change={"eagle_config": LEFT_OUT}
    )


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_weights_are_read_as_written(tmp_path: Path, kind: str):
    weights = write_head(tmp_path, EAGLE, kind=kind)
    head = read_head(tmp_path, two)
    assert head.draft_vocab is not None
    assert head.draft_vocab.tolist() == list(range(5, 300, 3))
    assert head.weights.head is not None
    keys = weights["midlayer.self_attn.k_proj.weight"]
    assert np.array_equal(floats(head.weights.head), weights["lm_head.weight"])
    assert np.array_equal(floats(head.weights.keys_values)[: len(keys)], keys)


def test_the_names_of_speculators_are_read_too(tmp_path: Path):
    weights = write_head(tmp_path / "a", EAGLE)
    renamed = {name.replace("midlayer", "layers.0"): rows for name, rows in weights.items()}
    write_head(tmp_path / "b", EAGLE, renamed)
    one, other = (read_head(tmp_path / name, two).weights for name in "ab")
    assert np.array_equal(one.query, other.query)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "config.json: architectures"),
        ({"architectures": LEFT_OUT}, "config.json: architectures"),
        ({"hidden_size": None}, "config.json: hidden_size"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: Input should be less than or equal to 1"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ({"draft_vocab_size": 400}, "draft_vocab_size is 400, the vocabulary has 320"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128, hidden_size 64"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"eagle_config": {IDS: [-1]}}, IDS),
    ],
)
def test_an_unsupported_config_is_rejected(tmp_path: Path, change: Mapping[str, Any], reason: str):
    assert reason in rejection(tmp_path, EAGLE, change=change)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"fc.weight": LEFT_OUT}, "fc.weight is missing"),
        ({"midlayer.mlp.up_proj.weight": LEFT_OUT}, "midlayer.mlp.up_proj.weight is missing"),
        ({"norm.weight": np.zeros(63)}, "norm.weight is [63], expected [64]"),
        ({"fc.weight": np.zeros((64, 192))}, "fc.weight is [64, 192], expected [64, 128]"),
        ({"lm_head.weight": np.full((99, 64), np.nan)}, "values that are not finite"),
        ({"d2t": LEFT_OUT}, "d2t is missing"),
        ({"d2t": np.zeros(98, np.int64)}, "d2t is [98], not [99]"),
        ({"d2t": np.full(99, -5, np.int64)}, "expected ascending tokens below 320"),
        ({"d2t": np.full(99, 300, np.int64)}, "expected ascending tokens below 320"),
    ],
)
def test_faulty_tensors_are_named(tmp_path: Path, tensors: Mapping[str, Any], reason: str):
    assert reason in rejection(tmp_path, EAGLE, tensors=tensors)


@pytest.mark.parametrize("cut", [0, 500])
def test_cut_safetensors_are_rejected(tmp_path: Path, cut: int):
    for form in (EAGLE, OWN):
        write_head(tmp_path, form)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:cut])
        with raises(ModelError, "model.safetensors"):
            read_head(tmp_path, two)


@pytest.mark.parametrize("form", [EAGLE, OWN], ids=["eagle3", "qwen3_5"])
def test_a_head_of_another_target_is_rejected(tmp_path: Path, form: HeadForm):
    write_head(tmp_path, form, change={"vocab_size": 400})
    with raises(ModelError, "another target", 400, 320):
        HeadNetwork(read_head(tmp_path, two), MlxEnds())


def test_a_head_with_another_width_or_depth_is_rejected(tmp_path: Path):
    wide = HeadForm(d=128)
    deep = HeadForm(own=True, taps=(4,), kv_heads=1, layers=5)
    for form, size in ((wide, 128), (deep, 5)):
        write_head(tmp_path, form)
        with raises(ModelError, size):
            HeadNetwork(read_head(tmp_path, two), MlxEnds())


# -- Qwen3.5 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
        ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"model_type": "qwen3_5_moe_text"}, "'qwen3_5_text', not 'qwen3_5_moe_text'"),
    ],
)
def test_an_unsupported_model_is_rejected(tmp_path: Path, change: Mapping[str, Any], reason: str):
    message = rejection(tmp_path, OWN, change=change)
    assert reason in message
    assert "MTP head" in message


def test_a_checkpoint_that_names_a_head_and_lacks_its_tensors_is_rejected(tmp_path: Path):
    names = [name for name in write_head(tmp_path, OWN) if name.startswith("mtp.")]
    message = rejection(tmp_path, OWN, tensors=dict.fromkeys(names, LEFT_OUT))
    assert "names an MTP head in its config.json and has no tensors mtp.*" in message
    assert not has_head(tmp_path)
    assert shipped("x", tmp_path, "mlx") == {}, "auto does without"
    assert "mtp.fc.weight is missing" in rejection(
        tmp_path, OWN, tensors={"mtp.fc.weight": LEFT_OUT}
    )
    norm = {"model.language_model.norm.weight": LEFT_OUT}
    assert "target_norm.weight is missing" in rejection(tmp_path, OWN, tensors=norm)


def test_a_checkpoint_converted_for_mlx_is_rejected(tmp_path: Path):
    conv = {"model.layers.0.linear_attn.conv1d.weight": np.zeros((8, 4, 1))}
    assert "was converted for MLX" in rejection(tmp_path, OWN, tensors=conv)


def test_a_checkpoint_with_a_head_is_its_own_drafter(tmp_path: Path):
    write_head(tmp_path, OWN)
    assert has_head(tmp_path)
    assert shipped("x", tmp_path, "mlx") == {"mtp": tmp_path}
    assert shipped("x", tmp_path, "llamacpp") == {}
    write_head(tmp_path, OWN, change={"mtp_num_hidden_layers": LEFT_OUT})
    assert not has_head(tmp_path)
