"""Files of heads: fields of config.json, weights, and the errors that name their faults.

pydantic checks the types of fields; these tests cover their meaning and our own rules.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.drafters import HeadFacts, read_facts, shipped
from paceline.errors import ModelError
from paceline_mlx.heads.config import Llama3Rope
from paceline_mlx.heads.dflash.checkpoint import read_config as read_block
from paceline_mlx.heads.dflash.checkpoint import read_tensors
from paceline_mlx.heads.mtp import qwen3_5, read_config
from support.dflash import LEFT_OUT, tiny_config, write_checkpoint, write_config
from support.errors import raises
from support.heads import CHAINED, EAGLE, OWN, Head
from support.mtp import HeadForm, write_head

pytestmark = pytest.mark.mlx

CONFIG = tiny_config()


def opened(folder: Path, kind: str) -> Any:
    return Head(kind, folder, None).opened()


# -- DFlash's config -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", CHAINED)
def test_a_config_is_read_back(tmp_path: Path, form: str):
    config = tiny_config(**CHAINED[form])
    write_checkpoint(tmp_path, config)
    assert read_block(tmp_path) == config
    named = "DFlash 2" if form.startswith("dflash") else "DSpark"
    assert read_facts(tmp_path) == HeadFacts("dflash", named, 64, 320, 2)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_KINDS = ["full_attention", "sliding_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 2000.0}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (dict.fromkeys(("head_dim", "layer_types", "hidden_act"), LEFT_OUT), {}),
        (
            {"rms_norm_eps": LEFT_OUT, "rope_theta": LEFT_OUT},
            {"rms_norm_eps": 1e-6, "rope_theta": 1e4},
        ),
        ({"rope_theta": LEFT_OUT, "rope_parameters": _ROPE}, {"rope_theta": 2000.0}),
        ({"rope_scaling": LLAMA3}, {"llama3_rope": Llama3Rope(8.0, 1.0, 4.0, 8192)}),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            {"rope_theta": 5e5, "llama3_rope": Llama3Rope(8.0, 1.0, 4.0, 8192)},
        ),
        ({"sliding_window": 5}, {}),
        ({"sliding_window": 5, "layer_types": _KINDS}, {"windows": (None, 5)}),
    ],
    ids=repr,
)
def test_config_defaults_and_variants_are_recognized(tmp_path: Path, change: Any, expected: Any):
    write_checkpoint(tmp_path, CONFIG, change=change)
    assert read_block(tmp_path) == replace(CONFIG, **expected)


@pytest.mark.reference
def test_rope_frequencies_match_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(head_dim=128, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    periods = Llama3Rope(8.0, 1.0, 4.0, 8192).periods(128, 5e5)
    np.testing.assert_allclose(1 / periods, expected, rtol=1e-6)


def test_all_errors_are_reported_together(tmp_path: Path):
    nested = {"target_layer_ids": [], "mask_token_id": None}
    types = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": LEFT_OUT, "block_size": 1}
    types |= {"dflash_config": nested, "rope_scaling": {"rope_type": "yarn"}, "hidden_act": "gelu"}
    write_checkpoint(tmp_path, CONFIG, change=types)
    faults = [
        *("'Qwen3ForCausalLM'", "hidden_size: ", "block_size: ", "'gelu'"),
        *("dflash_config.target_layer_ids: ", "dflash_config.mask_token_id: "),
        "rope_scaling.rope_type: Input should be 'default' or 'llama3', not 'yarn'",
    ]
    with raises(ModelError, str(tmp_path / "config.json"), *faults, lines=8):
        read_block(tmp_path)
    nested = {"target_layer_ids": [0, 2], "mask_token_id": 320}
    values = {"num_attention_heads": 4, "num_key_value_heads": 3, "dflash_config": nested}
    values |= {"layer_types": ["sliding_attention"], "sliding_window": None}
    write_checkpoint(tmp_path, CONFIG, change=values)
    faults = [
        "num_attention_heads is not a multiple of num_key_value_heads",
        "layer 2 is tapped; the target has 2 layers",
        "mask_token_id is 320; the vocabulary has 320 tokens",
        "layer_types has 1 entries, not 2",
        "sliding_window is None",
    ]
    with raises(ModelError, *faults, lines=6):
        read_block(tmp_path)


@pytest.mark.parametrize(
    ("form", "change", "fault"),
    [
        ("", {"head_dim": 31}, "head_dim: "),
        ("", {"head_dim": LEFT_OUT, "hidden_size": 66, "num_attention_heads": 4}, "even head size"),
        ("", {"rope_scaling": {"rope_type": "llama3"}}, "RoPE type llama3 requires factor"),
        ("", {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "not below its high_freq"),
        ("dflash 2", {"conv_group_size": 7}, "conv_group_size 7 does not divide hidden_size"),
        ("dflash 2", {"conv_kernel_size": 9}, "conv_kernel_size 9 > block_size 8"),
        ("dflash 2", {"selector_top_k": 999}, "selector_top_k 999 is larger than the vocabulary"),
        ("dspark, vanilla", {"markov_head_type": "trigram"}, "markov_head_type: "),
        ("dspark, vanilla", {"markov_head_type": LEFT_OUT}, "without a markov_head_type"),
        ("dspark, vanilla", {"markov_rank": 0}, "needs a markov_rank above 0"),
    ],
)
def test_a_contradictory_config_is_a_one_line_error(
    tmp_path: Path, form: str, change: Any, fault: str
):
    config = tiny_config(**CHAINED.get(form, {}))
    inner = "dflash_config" if form == "dflash 2" else None
    write_checkpoint(tmp_path, config, change=change, inner=inner)
    with raises(ModelError, fault):
        read_block(tmp_path)


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written", [{"kind": "BF16"}, {"kind": "F16"}, {"prefix": "model."}, {"files": 3}], ids=repr
)
def test_weights_are_read_back(tmp_path: Path, written: Any):
    import mlx.core as mx

    more = {"embed_tokens.weight": np.ones((320, 64), np.float32)}  # not the drafter's
    expected = write_checkpoint(tmp_path, CONFIG, tensors=more, **written)
    del expected["embed_tokens.weight"]
    tensors = read_tensors(tmp_path, CONFIG)
    assert tensors.keys() == expected.keys()
    for name, rows in expected.items():
        assert np.array_equal(np.array(tensors[name].astype(mx.float32)), rows), name


def test_five_invalid_tensors_are_named_and_the_rest_counted(tmp_path: Path):
    changed = {
        "fc.weight": LEFT_OUT,
        "hidden_norm.weight": np.full((64,), np.nan, np.float32),
        "layers.1.self_attn.q_proj.weight": np.ones((3, 64), np.float32),
    }
    write_checkpoint(tmp_path, CONFIG, tensors=changed)
    faults = ["fc.weight is missing", "hidden_norm.weight has values that are not finite"]
    faults.append("layers.1.self_attn.q_proj.weight is [3, 64], expected [64, 64]")
    with raises(ModelError, str(tmp_path), *faults):
        read_tensors(tmp_path, CONFIG)
    deeper = replace(CONFIG, num_hidden_layers=4, windows=(None,) * 4)
    with raises(ModelError, "layers.2.", "20 more"):
        read_tensors(tmp_path, deeper)
    write_checkpoint(tmp_path, CONFIG, tensors={"fc.weight": np.zeros((64, 128), np.int64)})
    with raises(ModelError, "fc.weight", "int64"):
        read_tensors(tmp_path, CONFIG)
    write_checkpoint(tmp_path, CONFIG, kind="F64")
    with raises(ModelError, "F64"):
        read_tensors(tmp_path, CONFIG)


@pytest.mark.parametrize("end", [None, 4, -1])
def test_a_folder_without_complete_weights_is_rejected(tmp_path: Path, end: int | None):
    path = tmp_path / "model.safetensors"
    for kind, name in (("dflash", "block"), ("mtp", "eagle"), ("mtp", "own")):
        if name == "block":
            write_checkpoint(tmp_path, CONFIG)
        else:
            write_head(tmp_path, EAGLE if name == "eagle" else OWN)
        if end is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:end])
        with raises(ModelError, "model.safetensors" if end is not None else ".safetensors"):
            opened(tmp_path, kind)


def test_a_head_for_another_target_is_rejected(tmp_path: Path):
    sizes = {"hidden_size": 576, "num_target_layers": 30, "vocab_size": 49152}
    write_checkpoint(tmp_path / "block", CONFIG, change=sizes)
    faults = ["hidden size is 576, the target's 64", "layers is 30", "vocabulary is 49152"]
    with raises(ModelError, "another target", *faults):
        opened(tmp_path / "block", "dflash")
    write_head(tmp_path / "own", OWN, change={"vocab_size": 400})
    with raises(ModelError, "another target", 400, 320):
        opened(tmp_path / "own", "mtp")


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
def test_tap_layers_match_vllm_and_sglang(
    tmp_path: Path, change: dict[str, Any], layers: int, taps: tuple[int, ...]
):
    write_head(tmp_path, EAGLE, change={**change, "rope_scaling": LLAMA3})
    config = read_config(tmp_path, lambda: layers)
    assert (config.taps, config.llama3_rope) == (taps, Llama3Rope(8.0, 1.0, 4.0, 8192))


def test_a_deepspec_head_names_its_target_and_uses_its_embeddings(tmp_path: Path):
    copies = {"lm_head.weight": np.ones((320, 64)), "embed_tokens.weight": np.ones((320, 64))}
    write_head(tmp_path, HeadForm(deepspec=True), tensors=copies)
    config = read_config(tmp_path, lambda: 2)
    assert (config.taps, config.num_target_layers, config.draft_vocab_size) == ((0, 1), 2, None)
    assert opened(tmp_path, "mtp")._weights.head is None
    assert read_facts(tmp_path) == HeadFacts("mtp", "EAGLE-3", 64, 320, 2)


def test_speculators_names_are_recognized(tmp_path: Path):
    weights = write_head(tmp_path / "a", EAGLE)
    renamed = {name.replace("midlayer", "layers.0"): rows for name, rows in weights.items()}
    write_head(tmp_path / "b", EAGLE, renamed)
    text = Head.chain(tmp_path / "c", EAGLE).text(9)
    one, other = (Head("mtp", tmp_path / name, None) for name in "ab")
    assert one.drafted(text.rows(), token=0) == other.drafted(text.rows(), token=0)
    assert read_facts(tmp_path / "a") == HeadFacts("mtp", "EAGLE-3", 64, 320, None)


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        ({"midlayer.mlp.up_proj.weight": LEFT_OUT}, "midlayer.mlp.up_proj.weight is missing"),
        ({"lm_head.weight": np.full((99, 64), np.nan)}, "values that are not finite"),
        ({"d2t": LEFT_OUT}, "d2t is missing"),
        ({"d2t": np.zeros(98, np.int64)}, "d2t is [98], not [99]"),
        ({"d2t": np.full(99, -5, np.int64)}, "that ascend and are below 320"),
        ({"d2t": np.full(99, 300, np.int64)}, "that ascend and are below 320"),
    ],
)
def test_invalid_tensors_are_named(tmp_path: Path, tensors: Mapping[str, Any], fault: str):
    write_head(tmp_path, EAGLE, tensors=tensors)
    with raises(ModelError, fault):
        opened(tmp_path, "mtp")


# -- Qwen3.5 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "change", "fault"),
    [
        (EAGLE, {"eagle_config": LEFT_OUT}, "a target with 2 layers is too small"),
        (
            EAGLE,
            {"num_hidden_layers": 2},
            "num_hidden_layers: Input should be less than or equal to 1",
        ),
        (EAGLE, {"draft_vocab_size": 400}, "draft_vocab_size 400 is above vocab_size 320"),
        (EAGLE, {"target_hidden_size": 128}, "target_hidden_size 128 differs from hidden_size 64"),
        (EAGLE, {"norm_before_residual": True}, "norm_before_residual"),
        (EAGLE, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        (EAGLE, {"architectures": ["Qwen3Eagle3Model"]}, "target_layer_ids is missing"),
        (OWN, {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
        (OWN, {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        (OWN, {"attn_output_gate": False}, "attn_output_gate"),
        (OWN, {"model_type": "qwen3_5_moe_text"}, "'qwen3_5_text', not 'qwen3_5_moe_text'"),
    ],
)
def test_an_unsupported_head_or_model_is_rejected(
    tmp_path: Path, form: HeadForm, change: Mapping[str, Any], fault: str
):
    write_head(tmp_path, form, change=change)
    with raises(ModelError, fault, lines=3 if "architectures" in change else 1) as caught:
        opened(tmp_path, "mtp")
    assert form is EAGLE or "MTP head" in str(caught.value)


def test_a_checkpoint_with_a_head_drafts_for_itself_if_its_tensors_exist(tmp_path: Path):
    names = [name for name in write_head(tmp_path, OWN) if name.startswith("mtp.")]
    assert shipped("x", tmp_path, "mlx") == {"mtp": tmp_path}
    assert shipped("x", tmp_path, "llamacpp") == {}
    write_head(tmp_path, OWN, tensors=dict.fromkeys(names, LEFT_OUT))
    assert not qwen3_5.has_head(tmp_path)
    with raises(ModelError, "has an MTP head in its config.json but no mtp.* tensors"):
        opened(tmp_path, "mtp")
    write_head(tmp_path, OWN, tensors={"model.language_model.norm.weight": LEFT_OUT})
    with raises(ModelError, "target_norm.weight is missing"):
        opened(tmp_path, "mtp")
    write_head(tmp_path, OWN, change={"mtp_num_hidden_layers": LEFT_OUT})
    assert shipped("x", tmp_path, "mlx") == {}
    by_mlx = {"model.layers.0.linear_attn.conv1d.weight": np.zeros((8, 4, 1))}
    write_head(tmp_path, OWN, tensors=by_mlx)
    with raises(ModelError, "was converted for MLX"):
        opened(tmp_path, "mtp")


# -- which head a folder has -----------------------------------------------------------------------


def test_an_unknown_architecture_has_no_head_and_an_invalid_head_is_rejected(tmp_path: Path):
    for name in ("Gemma4DSparkModel", "Qwen3ForCausalLM", 5):
        write_config(tmp_path, {"architectures": [name]})
        assert read_facts(tmp_path) is None
    assert read_facts(tmp_path / "nothing") is None
    write_config(tmp_path, {"architectures": ["DFlashDraftModel"]})
    with raises(ModelError, "hidden_size", lines=10):
        read_facts(tmp_path)
