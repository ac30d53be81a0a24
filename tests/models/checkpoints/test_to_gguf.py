"""Checkpoints as GGUF files: what is in the file, and what is refused before there is one."""

import json
import math
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from paceline.errors import InvalidRequest, ModelError
from paceline.models.checkpoints import tensors
from paceline.models.checkpoints.convert import plan, write
from paceline.models.checkpoints.families import FAMILIES
from support.errors import raises
from support.tiny_checkpoints import FORMS, write_checkpoint, write_gguf_of, write_safetensors

Type = GGMLQuantizationType
Tensors = dict[str, np.ndarray]


def read(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Metadata, and tensors as float32 in their shapes."""
    reader = GGUFReader(path)
    tensors = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        tensors[tensor.name] = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def stored(folder: Path) -> Tensors:
    """Tensors of a checkpoint."""
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def convert(folder: Path, weights: str = "f32") -> Path:
    """The GGUF file of a checkpoint, beside it."""
    path = folder.with_name(f"{folder.name}-{weights}.gguf")
    write(plan(folder, weights), path, lambda _done: None)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny checkpoint."""

    def make(form: str = "qwen3", **config: Any) -> Path:
        return write_checkpoint(form, tmp_path / form, **config)

    return make


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_every_row_of_the_table_is_among_the_tested_forms():
    assert {form.split("-")[0].replace("llama3", "llama") for form in FORMS} >= {
        # These hold a text model of the same name beside encoders.
        *(FAMILIES.keys() - {"gemma3", "gemma4", "qwen3_5", "qwen3_5_moe"})
    }


@pytest.mark.parametrize(
    ("form", "kind"), [("llama", "llama"), ("smollm3", "smollm3"), ("minicpm", "minicpm")]
)
def test_q_and_k_bring_together_what_is_rotated_together(
    form: str, kind: str, checkpoint: Callable[..., Path]
):
    folder = checkpoint(form)
    fields, tensors = read(convert(folder))
    assert fields["general.architecture"] == kind
    head = fields[f"{kind}.attention.key_length"]
    for part, count in (("q", "head_count"), ("k", "head_count_kv")):
        heads = fields[f"{kind}.attention.{count}"]
        before = stored(folder)[f"model.layers.1.self_attn.{part}_proj.weight"]
        after = tensors[f"blk.1.attn_{part}.weight"]
        for row in range(heads * head):
            first, at = row // head * head, row % head
            # The halves of a head: values i and i + head / 2 are neighbours in the file.
            assert (after[row] == before[first + at // 2 + (at % 2) * head // 2]).all()
    v = "model.layers.1.self_attn.v_proj.weight"
    assert (tensors["blk.1.attn_v.weight"] == stored(folder)[v]).all()


@pytest.mark.parametrize("form", ["qwen2", "qwen3", "gemma3_text", "phi3", "exaone4"])
def test_families_that_rotate_halves_keep_their_rows(form: str, checkpoint: Callable[..., Path]):
    folder = checkpoint(form)
    tensors, before = read(convert(folder))[1], stored(folder)
    part = "qkv" if form == "phi3" else "q"
    assert (
        tensors[f"blk.0.attn_{part}.weight"]
        == before[f"model.layers.0.self_attn.{part}_proj.weight"]
    ).all()


def test_biases_are_reordered_with_their_rows(checkpoint: Callable[..., Path]):
    folder = checkpoint("llama", attention_bias=True)
    tensors, before = read(convert(folder))[1], stored(folder)
    bias = before["model.layers.0.self_attn.k_proj.bias"].reshape(2, 2, 32)
    assert (tensors["blk.0.attn_k.bias"] == bias.swapaxes(1, 2).reshape(-1)).all()
    assert "blk.0.attn_output.bias" in tensors


@pytest.mark.parametrize(
    ("form", "shift"),
    [("gemma", 1), ("gemma2", 1), ("gemma3_text", 1), ("gemma4_text", 0), ("qwen3", 0)],
)
def test_norms_that_are_stored_less_one_get_it_back(
    form: str, shift: int, checkpoint: Callable[..., Path]
):
    folder = checkpoint(form)
    tensors, before = read(convert(folder))[1], stored(folder)
    for name, source in {
        "output_norm": "model.norm",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
    }.items():
        assert tensors[f"{name}.weight"] == pytest.approx(before[f"{source}.weight"] + shift)
    embeddings = before["model.embed_tokens.weight"]
    assert (tensors["token_embd.weight"] == embeddings).all()


def test_tied_embeddings_are_in_the_file_once(checkpoint: Callable[..., Path]):
    assert "output.weight" not in read(convert(checkpoint("gemma2")))[1]
    folder = checkpoint("llama")
    head = read(convert(folder))[1]["output.weight"]
    assert (head == stored(folder)["lm_head.weight"]).all()
    # A copy of tied embeddings, as some tools write it, is of no use.
    change_config(folder, tie_word_embeddings=True)
    assert "output.weight" not in read(convert(folder, "f16"))[1]


@pytest.mark.parametrize("form", ["qwen3_moe", "olmoe", "glm4_moe"])
def test_experts_of_both_layouts_make_the_same_file(form: str, checkpoint: Callable[..., Path]):
    """Experts of their own, as on the hub; or stacked, gate above up, as in transformers 5."""
    folder = checkpoint(form)
    single = convert(folder)
    tensors = stored(folder)
    result: Tensors = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"(.*\.experts\.)(\d+)\.(gate|down)_proj\.weight", name)
        if match is None:
            if ".experts." not in name:
                result[name] = values
            continue
        prefix, expert, part = match[1], int(match[2]), match[3]
        up = [tensors[f"{prefix}{expert}.up_proj.weight"]] if part == "gate" else []
        matrix = np.concatenate([values, *up])
        target = prefix + {"gate": "gate_up_proj", "down": "down_proj"}[part]
        result.setdefault(target, np.zeros((4, *matrix.shape), np.float32))[expert] = matrix
    write_safetensors(folder / "model.safetensors", result)
    assert convert(folder, "f32").read_bytes() == single.read_bytes()
    experts = read(single)[1]["blk.1.ffn_down_exps.weight"]
    assert (experts[3] == tensors["model.layers.1.mlp.experts.3.down_proj.weight"]).all()


def test_gpt_oss_has_gate_and_up_in_turns(checkpoint: Callable[..., Path]):
    folder = checkpoint("gpt_oss")
    tensors, before = read(convert(folder))[1], stored(folder)
    both = before["model.layers.0.mlp.experts.gate_up_proj"]  # [experts, in, 2 * out]
    assert (tensors["blk.0.ffn_gate_exps.weight"][2] == both[2][:, 0::2].T).all()
    assert (tensors["blk.0.ffn_up_exps.weight"][2] == both[2][:, 1::2].T).all()
    biases = before["model.layers.0.mlp.experts.gate_up_proj_bias"]
    assert (tensors["blk.0.ffn_up_exps.bias"] == biases[:, 1::2]).all()
    assert (tensors["blk.0.attn_sinks.weight"] == before["model.layers.0.self_attn.sinks"]).all()


def test_mxfp4_experts_keep_every_value(checkpoint: Callable[..., Path]):
    folder = checkpoint("gpt_oss-mxfp4")
    tensors, before = read(convert(folder, "int4"))[1], stored(folder)
    prefix = "model.layers.1.mlp.experts."
    # OCP's e2m1: a sign, two bits of exponent, one of fraction. The scale is a power of two.
    plain = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = np.array([*plain, *(-value for value in plain)])
    for part, source, chosen in (
        ("gate", "gate_up_proj", slice(0, None, 2)),
        ("up", "gate_up_proj", slice(1, None, 2)),
        ("down", "down_proj", slice(None)),
    ):
        blocks, scales = (before[f"{prefix}{source}_{kind}"] for kind in ("blocks", "scales"))
        pairs = np.stack([table[blocks & 15], table[blocks >> 4]], axis=-1)
        values = pairs.reshape(*blocks.shape[:3], 32) * 2.0 ** (scales[..., None].astype(int) - 127)
        expected = values.reshape(*blocks.shape[:2], -1)[:, chosen]
        assert (tensors[f"blk.1.ffn_{part}_exps.weight"] == expected).all()


def test_llama3_positions_become_factors(checkpoint: Callable[..., Path]):
    factors = read(convert(checkpoint("llama3")))[1]["rope_freqs.weight"]
    expected = []
    for pair in range(32):
        wave = 2 * math.pi * 500000.0 ** (2 * pair / 64)
        if wave < 64 / 4:
            expected.append(1.0)
        elif wave > 64:
            expected.append(8.0)
        else:
            smooth = (64 / wave - 1) / 3
            expected.append(1 / ((1 - smooth) / 8 + smooth))
    assert len({1.0, 8.0} & {*expected}) == 2
    assert len({*expected}) > 2
    assert factors == pytest.approx(expected, rel=1e-6)


def test_longrope_has_both_sets_of_factors(checkpoint: Callable[..., Path]):
    folder = checkpoint("phi3-longrope")
    fields, tensors = read(convert(folder))
    values = json.loads((folder / "config.json").read_text())["rope_parameters"]
    for kind in ("long", "short"):
        assert tensors[f"rope_factors_{kind}.weight"] == pytest.approx(values[f"{kind}_factor"])
    assert fields["phi3.rope.scaling.attn_factor"] == pytest.approx(
        math.sqrt(1 + math.log(4) / math.log(128))
    )


def test_gemma4_rotates_a_part_of_its_large_heads(checkpoint: Callable[..., Path]):
    fields, tensors = read(convert(checkpoint("gemma4_text")))
    factors = tensors["rope_freqs.weight"]
    assert factors.shape == (256,)
    assert (factors[:64] == 1).all()
    assert (factors[64:] > 1e20).all()
    assert fields["gemma4.attention.key_length"] == 512
    assert fields["gemma4.attention.key_length_swa"] == 256
    # The last layers attend to the keys of layers 3 and 2.
    assert (tensors["blk.4.attn_k.weight"] == tensors["blk.3.attn_k.weight"]).all()
    assert (tensors["blk.5.attn_k.weight"] == tensors["blk.2.attn_k.weight"]).all()


@pytest.mark.parametrize(
    ("form", "config", "expected"),
    [
        ("mistral", {}, {"attention.sliding_window_pattern": [True, True]}),
        ("mistral", {"sliding_window": None}, {"attention.sliding_window": 0}),
        # A window as large as the context is none.
        ("mistral", {"sliding_window": 512}, {"attention.sliding_window": 0}),
        ("gemma2", {}, {"attention.sliding_window": 16, "attn_logit_softcapping": 5.0}),
        ("gemma2", {"query_pre_attn_scalar": 16}, {"attention.scale": 0.25}),
        (
            "gemma2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            {"attention.sliding_window_pattern": [False, True]},
        ),
        ("gemma3_text-linear", {}, {"rope.freq_base_swa": 10000.0, "rope.scaling.factor": 8.0}),
        (
            "exaone4-window",
            {"layer_types": None},
            {"attention.sliding_window_pattern": [True, True, True, False]},
        ),
        ("qwen3_moe", {}, {"expert_count": 4, "expert_used_count": 2, "expert_weights_norm": True}),
        ("olmoe", {}, {"expert_weights_norm": False, "expert_feed_forward_length": 64}),
        ("glm4_moe", {}, {"leading_dense_block_count": 1, "rope.dimension_count": 64}),
        (
            "gemma4_text",
            {"use_double_wide_mlp": True},
            {"feed_forward_length": [128] * 4 + [256] * 2},
        ),
        ("hunyuan_v1_dense", {}, {"rope.freq_base": 10000.0 * 1000.0 ** (128 / 126)}),
        ("minicpm", {}, {"logit_scale": 2.0, "residual_scale": 1.4 / 2**0.5}),
    ],
)
def test_metadata_says_what_sets_a_family_apart(
    form: str, config: dict[str, Any], expected: dict[str, Any], tmp_path: Path
):
    fields, _ = read(write_gguf_of(form, tmp_path / "model.gguf", **config))
    kind = fields["general.architecture"]
    for key, value in expected.items():
        assert fields[f"{kind}.{key}"] == pytest.approx(value, rel=1e-6)


def test_a_configuration_of_transformers_4_says_the_same(checkpoint: Callable[..., Path]):
    """Base and scaling stood side by side, and the kind was called type."""
    form = "gemma3_text-linear"
    new = convert(checkpoint(form), "f16").read_bytes()
    scaling = {"type": "linear", "factor": 8.0}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling}
    assert convert(checkpoint(form, rope_parameters=None, **old)).read_bytes() != new
    assert convert(checkpoint(form, rope_parameters=None, **old), "f16").read_bytes() == new


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_half_precision_is_read_exactly(dtype: str, checkpoint: Callable[..., Path]):
    full = stored(checkpoint("llama"))["model.layers.0.mlp.up_proj.weight"]
    half = read(convert(checkpoint("llama", dtype=dtype)))[1]["blk.0.ffn_up.weight"]
    assert half.dtype == np.float32
    assert not (half == full).all()
    # bfloat16 keeps 8 bits of a number (cut off here), float16 keeps 11 (rounded), of one that is
    # not tiny.
    error = np.abs(half / full - 1)[np.abs(full) > 2**-14]
    assert error.max() < {"BF16": 2**-7, "F16": 2**-10}[dtype]
    assert (half.view(np.uint32) & (0xFFFF if dtype == "BF16" else 0x1FFF) == 0).all()


@pytest.mark.parametrize(
    ("weights", "matrices", "tables", "error"),
    [("int8", Type.Q8_0, Type.Q8_0, 0.01), ("int4", Type.Q4_0, Type.Q8_0, 0.12)],
)
def test_matrices_are_quantized_and_norms_are_not(
    weights: str, matrices: Type, tables: Type, error: float, checkpoint: Callable[..., Path]
):
    folder = checkpoint("qwen3_moe")
    path = convert(folder, weights)
    kinds = {tensor.name: tensor.tensor_type for tensor in GGUFReader(path).tensors}
    for name, kind in kinds.items():
        if name in ("token_embd.weight", "output.weight"):
            assert kind == tables
        elif "norm" in name or "ffn_gate_inp" in name:
            assert kind == Type.F32
        else:
            assert kind == matrices
    exact, stored = read(convert(folder))[1], read(path)[1]
    for name, values in exact.items():
        assert np.linalg.norm(stored[name] - values) <= error * np.linalg.norm(values)


def test_rows_that_no_block_divides_stay_in_f16(checkpoint: Callable[..., Path]):
    path = convert(checkpoint("llama", hidden_size=80, head_dim=20), "int4")
    kinds = {tensor.name: tensor.tensor_type for tensor in GGUFReader(path).tensors}
    assert kinds["blk.0.attn_q.weight"] == Type.F16
    assert kinds["blk.0.ffn_down.weight"] == Type.Q4_0


def test_the_size_is_known_before_the_first_byte(checkpoint: Callable[..., Path], tmp_path: Path):
    checkpoint_plan = plan(checkpoint("qwen3", vocab_size=4096), "int8")
    path, seen = tmp_path / "model.gguf", list[int]()
    write(checkpoint_plan, path, seen.append)
    assert checkpoint_plan.size <= path.stat().st_size <= checkpoint_plan.size * 1.02
    assert seen == sorted(seen)
    assert seen[-1] <= path.stat().st_size


@pytest.mark.parametrize("form", ["llama", "qwen3_moe", "gpt_oss-mxfp4", "gemma2"])
def test_pieces_do_not_change_the_file(
    form: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    folder = checkpoint(form)
    whole = convert(folder, "int4").read_bytes()
    monkeypatch.setattr(tensors, "_PIECE_VALUES", 300)
    assert convert(folder, "int4").read_bytes() == whole


def test_memory_does_not_grow_with_the_model(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tensors, "_PIECE_VALUES", 1 << 14)
    folder = checkpoint("llama", vocab_size=32768, dtype="BF16")  # two matrices of 8 MB as float32
    checkpoint_plan, path = plan(folder, "int8"), folder / "model.gguf"
    tracemalloc.start()
    try:
        write(checkpoint_plan, path, lambda _done: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 4e6
    assert peak < 2e6


def test_shards_are_read_like_one_file(checkpoint: Callable[..., Path]):
    folder = checkpoint("llama")
    one = convert(folder).read_bytes()
    split_in_two(folder)
    assert convert(folder).read_bytes() == one


def split_in_two(folder: Path) -> tuple[Path, Path]:
    """Replace a checkpoint's file by two and their index."""
    tensors = stored(folder)
    names = sorted(tensors)
    parts = folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"
    places = {}
    for part, chosen in zip(parts, (names[::2], names[1::2]), strict=True):
        write_safetensors(part, {name: tensors[name] for name in chosen})
        places.update(dict.fromkeys(chosen, part.name))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()
    return parts


@pytest.mark.parametrize(
    "prefix", [("model.language_model.", "model."), ("language_model.model.", "language_model.")]
)
def test_the_text_model_beside_encoders_is_converted_alone(
    prefix: tuple[str, str], checkpoint: Callable[..., Path]
):
    folder = checkpoint("gemma3_text", tie_word_embeddings=None)
    alone = convert(folder).read_bytes()
    tensors = {
        name.replace("model.", prefix[0], 1): values for name, values in stored(folder).items()
    }
    tensors[f"{prefix[1]}vision_tower.encoder.layers.0.mlp.fc1.weight"] = np.ones((4, 4))
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(4)
    write_safetensors(folder / "model.safetensors", tensors)
    path = folder / "config.json"
    text = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    assert convert(folder).read_bytes() == alone


def test_layers_that_predict_further_tokens_are_left_out(checkpoint: Callable[..., Path]):
    folder = checkpoint("glm4_moe")
    alone = convert(folder).read_bytes()
    tensors = stored(folder)
    extra = {"model.layers.3.eh_proj.weight": np.ones((4, 4), np.float32)}
    write_safetensors(folder / "model.safetensors", {**tensors, **extra})
    assert convert(folder).read_bytes() == alone


# What is refused


@pytest.mark.parametrize(
    ("values", "value"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is 1e-5"),
        ({"hidden_act": "relu2"}, "hidden_act is relu2"),
        ({"is_causal": False}, "is_causal is False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"layer_types": ["linear_attention"] * 2, "sliding_window": 8}, "full_attention"),
        ({"rope_parameters": {"rope_type": "su2"}}, "rope_type is su2"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor"),
        ({"rope_parameters": 7}, "rope_parameters is 7"),
        ({"rope_parameters": {"full_attention": 7}}, "rope_parameters"),
        ({"layer_types": [["full_attention"], {}], "sliding_window": 8}, "full_attention"),
        ({"quantization_config": ["fp8"]}, "quantization_config is ['fp8']"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
        ({"vocab_size": 321}, "[321, 64]"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is yes"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(
    values: dict[str, Any], value: str, checkpoint: Callable[..., Path]
):
    folder = checkpoint("qwen3")
    change_config(folder, **values)
    with raises(ModelError, value):
        plan(folder, "int8")


@pytest.mark.parametrize(
    ("form", "values", "value"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("olmoe", {"clip_qkv": 8}, "clip_qkv is 8"),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, "no_rope_layers"),
        ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block is True"),
        ("glm4_moe", {"n_group": 4}, "n_group is 4"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        (
            "phi3-longrope",
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0, 2.0]}},
            "rope_parameters.long_factor is [1.0, 2.0]",
        ),
    ],
)
def test_a_form_that_readers_do_not_know_is_refused(
    form: str, values: dict[str, Any], value: str, checkpoint: Callable[..., Path]
):
    folder = checkpoint(form)
    change_config(folder, **values)
    with raises(ModelError, value):
        plan(folder, "int8")


def test_weights_of_an_unknown_form_are_refused(checkpoint: Callable[..., Path]):
    with raises(InvalidRequest, "'int2'"):
        plan(checkpoint(), "int2")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, checkpoint: Callable[..., Path]):
    folder = checkpoint()
    (folder / name).unlink()
    with raises(ModelError, name):
        plan(folder, "int8")


def test_a_missing_shard_is_named(checkpoint: Callable[..., Path]):
    folder = checkpoint()
    _, second = split_in_two(folder)
    second.unlink()
    with raises(ModelError, second.name):
        plan(folder, "int8")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused_before_it_is_read(keep: int, checkpoint: Callable[..., Path]):
    path = checkpoint() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with raises(ModelError, "safetensors"):
        plan(path.parent, "int8")


def test_a_tensor_of_an_unknown_type_is_refused_by_name(checkpoint: Callable[..., Path]):
    path = checkpoint() / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    with raises(ModelError, "model.embed_tokens.weight", "I32"):
        plan(path.parent, "int8")


def test_a_tensor_that_is_left_over_is_named(checkpoint: Callable[..., Path]):
    folder = checkpoint()
    extra = {"model.layers.0.self_attn.gate.weight": np.ones((4, 4), np.float32)}
    write_safetensors(folder / "model.safetensors", {**stored(folder), **extra})
    with raises(ModelError, "qwen3", "model.layers.0.self_attn.gate"):
        plan(folder, "int8")


def test_a_tensor_in_two_shards_is_refused(checkpoint: Callable[..., Path]):
    folder = checkpoint()
    first, second = split_in_two(folder)
    second.write_bytes(first.read_bytes())
    with raises(ModelError, "model-00001", "model-00002"):
        plan(folder, "int8")
