"""A family that OpenVINO's frontend does not run, and messages send to the engine llamacpp: GLM-4.

ik_llama.cpp opens others, too, and computes some of them wrong: a family is named once it is here.
"""

from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.engines.invariance import CONDITIONS, measure_invariance
from support.tiny import gguf_writer, tokenizer_fields

pytest.importorskip("ik_llama_cpp")

CONTEXT, VOCABULARY = 512, 320
HEADS, KV_HEADS, SIZE, WIDTH, FF = 4, 2, 64, 256, 128
ROTATED = SIZE // 2
PARTS = {
    "input_layernorm": ("attn_norm", (WIDTH,)),
    "self_attn.q_proj": ("attn_q", (HEADS * SIZE, WIDTH)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * SIZE, WIDTH)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * SIZE, WIDTH)),
    "self_attn.o_proj": ("attn_output", (WIDTH, HEADS * SIZE)),
    "post_self_attn_layernorm": ("post_attention_norm", (WIDTH,)),
    "post_attention_layernorm": ("ffn_norm", (WIDTH,)),
    "mlp.gate_up_proj": ("ffn_up", (2 * FF, WIDTH)),
    "mlp.down_proj": ("ffn_down", (WIDTH, FF)),
    "post_mlp_layernorm": ("post_ffw_norm", (WIDTH,)),
}
"""Names of a layer's weights in a checkpoint of GLM-4 -> in GGUF, with the shape."""


def glm4_tensors() -> dict[str, tuple[str, np.ndarray]]:
    """Random weights: name in a checkpoint -> name in GGUF, and values."""
    table, norm = (VOCABULARY, WIDTH), (WIDTH,)
    shapes = {
        "model.embed_tokens.weight": ("token_embd.weight", table),
        "model.norm.weight": ("output_norm.weight", norm),
        "lm_head.weight": ("output.weight", table),
    }
    for layer in range(2):
        for part, (name, shape) in PARTS.items():
            shapes[f"model.layers.{layer}.{part}.weight"] = (f"blk.{layer}.{name}.weight", shape)
    rng = np.random.default_rng(0)
    return {
        part: (name, rng.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape).astype(np.float32))
        for part, (name, shape) in shapes.items()
    }


def write_glm4(path: Path) -> Path:
    about = {
        **{"block_count": 2, "context_length": CONTEXT, "embedding_length": WIDTH},
        **{"feed_forward_length": FF, "attention.head_count": HEADS},
        **{"attention.head_count_kv": KV_HEADS, "attention.key_length": SIZE},
        **{"attention.value_length": SIZE, "attention.layer_norm_rms_epsilon": 1e-5},
        **{"rope.dimension_count": ROTATED, "rope.freq_base": 10000.0},
    }
    fields = {f"glm4.{name}": value for name, value in about.items()}
    with gguf_writer(path, "glm4", {**fields, **tokenizer_fields("glm4", VOCABULARY)}) as writer:
        for name, values in glm4_tensors().values():
            writer.add_tensor(name, values)
    return path


def opened(path: Path) -> Engine:
    settings = EngineSettings(threads=1, cache_tokens=3 * CONTEXT)
    return open_engine("llamacpp", path, CONTEXT, settings)


def test_rows_are_the_same_however_they_are_computed(tmp_path: Path):
    conditions = measure_invariance(opened(write_glm4(tmp_path / "m.gguf")))
    assert {name: value.differing for name, value in conditions.items()} == dict.fromkeys(
        CONDITIONS, 0
    )


@pytest.mark.reference
def test_logits_are_those_of_transformers(tmp_path: Path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Glm4Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=FF,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        attention_bias=False,
        pad_token_id=0,
    )
    model = transformers.Glm4ForCausalLM(config).eval()
    weights = {part: torch.from_numpy(values) for part, (_, values) in glm4_tensors().items()}
    model.load_state_dict(weights)
    tokens = np.random.default_rng(3).integers(3, 250, 120).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    engine = opened(write_glm4(tmp_path / "m.gguf"))
    block = Block(tokens, len(tokens), prefill=True)
    rows = engine.step([(engine.open(), block)]).logits[0]
    apart = np.sqrt(((rows - expected) ** 2).mean() / (expected**2).mean())
    assert apart < 5e-3, "as far as keys and values in 16 bits"
