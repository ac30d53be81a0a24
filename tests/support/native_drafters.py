"""GGUF drafters for a target of two-cycles: random ones, and perfect ones.

The target's next token depends on its last one alone: `a` is followed by `b` and `b` by `a`. So a
text alternates, and the token at a position is the one at any even distance from it. A perfect
drafter reads that from positions: keys and queries are rotated by half a turn a token, so that
attention sees every second row. Wired one row, or one position, off, it is always wrong:

    positions       0  1  2  3  |  4     5     6
    tokens          a  b  a  b  |  a     mask  mask
    seen from 5     .  b  .  b  |  .     .     .        so it is the token after b's partner
"""

from collections.abc import Mapping
from math import pi
from pathlib import Path
from typing import Any

import numpy as np

from support.tiny import SIZES, gguf_writer, tokenizer_fields, vocabulary, write_tiny

D, FF, HEADS, KV_HEADS, HEAD = 64, 128, 4, 2, 16
SIZES_OF_TARGET = {**SIZES, "layers": 4}
LAYERS = (1, 2, 3)
"""Layers of the target whose inputs are read."""
COUNT = len(vocabulary()[0])
MASK = COUNT - 2
_SCALE = 30.0
"""Of the target's logits: a temperature of 0.8 leaves its choices as they are."""


def partner(token: int) -> int:
    """The token that follows."""
    return token ^ 1


def write_cycles(path: Path) -> Path:
    """The target."""
    rows = _embeddings()
    tensors = {"token_embd.weight": rows, "output.weight": _SCALE * rows[_partners()]}
    for layer in range(SIZES_OF_TARGET["layers"]):
        tensors[f"blk.{layer}.attn_output.weight"] = np.zeros((D, HEADS * HEAD))
        tensors[f"blk.{layer}.ffn_down.weight"] = np.zeros((D, FF))
    tensors["output_norm.weight"] = np.ones(D)
    return write_tiny(path, sizes=SIZES_OF_TARGET, tensors=tensors)


def write_dflash(
    path: Path,
    *,
    perfect: bool,
    seed: int = 1,
    tensors: Mapping[str, np.ndarray] | None = None,
    **fields: Any,
) -> Path:
    """A DFlash drafter of a block of 8; `fields` replace its own, and `tensors` add to its own."""
    rng = np.random.default_rng(seed)
    tensors = {**(tensors or {}), **_layer(rng, D, with_norms=True)}
    tensors |= {
        "fc.weight": rng.normal(0, 0.2, (D, len(LAYERS) * D)),
        "enc.output_norm.weight": np.ones(D),
        "output_norm.weight": np.ones(D),
    }
    if perfect:
        tensors |= {"fc.weight": np.tile(np.eye(D), len(LAYERS))}
        # A row is its own token, or with a Markov head the one after it.
        sign = 1 if "markov_w1.weight" in tensors else -1
        tensors |= _alternating(D, halves=(0, 0), signs=(sign, sign))
    own = {
        "dflash.block_size": 8,
        "dflash.target_layers": [*LAYERS],
        "dflash.attention.causal": False,
        "tokenizer.ggml.mask_token_id": MASK,
    }
    return _write(path, "dflash", {**own, **fields}, tensors)


def write_dflash2(path: Path, *, perfect: bool, seed: int = 1) -> Path:
    """A DFlash 2 drafter: with convolutions, and a random selector of 7 candidates."""
    rng = np.random.default_rng(seed)
    kernel, group, rank = 3, 16, 8
    convolutions = {
        f"blk.0.{part}_conv_{name}": rng.normal(0, 0.2, shape)
        for part in ("attn", "ffn")
        for name, shape in (("base", (2, kernel, D)), ("proj.weight", (2 * kernel * D // group, D)))
    }
    if perfect:  # they leave rows as they are
        for part in ("attn", "ffn"):
            convolutions[f"blk.0.{part}_conv_base"] = np.zeros((2, kernel, D))
            convolutions[f"blk.0.{part}_conv_base"][:, 0] = 1
            convolutions[f"blk.0.{part}_conv_proj.weight"] *= 0
    selector = {
        "selector_predecessor.weight": rng.normal(0, 0.2, (COUNT, rank)),
        "selector_successor.weight": rng.normal(0, 0.2, (COUNT, rank)),
        "selector_hidden.weight": rng.normal(0, 0.2, (rank, D)),
    }
    fields = {
        **{"dflash.conv_kernel_size": kernel, "dflash.conv_group_size": group},
        **{"dflash.selector_rank": rank, "dflash.selector_top_k": 7},
    }
    tensors = convolutions | selector
    return write_dflash(path, perfect=perfect, seed=seed, tensors=tensors, **fields)


def write_dspark(path: Path, *, perfect: bool, seed: int = 1) -> Path:
    """A DSpark drafter, with a random Markov head: it drafts from the first row on."""
    rng = np.random.default_rng(seed)
    heads = {
        "markov_w1.weight": rng.normal(0, 0.2, (COUNT, 8)),
        "markov_w2.weight": rng.normal(0, 0.2, (COUNT, 8)),
        "conf_proj.weight": rng.normal(0, 0.2, (1, D + 8)),
    }
    return write_dflash(path, perfect=perfect, seed=seed, tensors=heads)


def write_eagle3(
    path: Path,
    *,
    perfect: bool,
    seed: int = 1,
    tensors: Mapping[str, np.ndarray] | None = None,
    **fields: Any,
) -> Path:
    """An EAGLE-3 drafter; `fields` replace its own, and `tensors` add to its own."""
    rng = np.random.default_rng(seed)
    tensors = {**(tensors or {}), **_layer(rng, 2 * D, with_norms=False)}
    tensors |= {
        "fc.weight": rng.normal(0, 0.2, (D, len(LAYERS) * D)),
        "output_norm.weight": np.ones(D),
        "blk.0.attn_norm_2.weight": np.ones(D),
        "output.weight": rng.normal(0, 0.2, (COUNT, D)),
    }
    if perfect:
        tensors |= {"fc.weight": np.tile(np.eye(D), len(LAYERS)) / len(LAYERS)}
        tensors |= {"output.weight": _SCALE * _embeddings()[_partners()]}
        # The token of a row has the right parity, the state before it the other. What passes the
        # layer next to attention is small, or a chain would add up its drafts.
        tensors |= {"blk.0.attn_norm_2.weight": np.full(D, 0.05)}
        tensors |= _alternating(2 * D, halves=(0, D), signs=(1, -1))
        tensors["blk.0.attn_v.weight"][HEAD:] /= 0.05
    own = {
        "eagle3.target_layers": [*LAYERS],
        "eagle3.target_hidden_size": D,
        "eagle3.norm_before_residual": perfect,
    }
    return _write(path, "eagle3", {**own, **fields}, tensors)


def _partners() -> np.ndarray:
    return np.arange(COUNT) ^ 1


def _embeddings() -> np.ndarray:
    """[tokens, D]: a constant, and a direction of its own for each token but the mask."""
    rows = np.zeros((COUNT, D), np.float32)
    directions = np.random.default_rng(0).normal(size=(COUNT, HEAD))
    rows[:, 1 : 1 + HEAD] = 4 * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    rows[MASK, 1:] = 0
    rows[:, 0] = 1
    return rows


def _layer(rng: np.random.Generator, width: int, *, with_norms: bool) -> dict[str, np.ndarray]:
    """A random layer whose attention reads rows of a width."""
    q, kv = HEADS * HEAD, KV_HEADS * HEAD
    shapes = {
        **{"attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width)},
        **{"attn_output": (D, q), "ffn_gate": (FF, D), "ffn_up": (FF, D), "ffn_down": (D, FF)},
        **{"attn_norm": (D,), "ffn_norm": (D,)},
        **({"attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)} if with_norms else {}),
    }
    return {
        f"blk.0.{name}.weight": np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.2, shape)
        for name, shape in shapes.items()
    }


def _alternating(
    width: int, halves: tuple[int, int], signs: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Attention that adds, of each head of keys, the directions in every second row.

    `halves` are where a head's directions begin in a row; `signs` say whether it sees even or odd
    distances.
    """
    queries, keys = np.zeros((HEADS * HEAD, width)), np.zeros((KV_HEADS * HEAD, width))
    values, out = np.zeros((KV_HEADS * HEAD, width)), np.zeros((D, HEADS * HEAD))
    groups = HEADS // KV_HEADS
    for head in range(KV_HEADS):
        keys[head * HEAD, 0] = 8 * signs[head]  # dimension 0 of a row is constant
        for row in range(HEAD):
            values[head * HEAD + row, halves[head] + 1 + row] = 1
        for query in range(head * groups, (head + 1) * groups):
            queries[query * HEAD, 0] = 8
            for row in range(HEAD):
                out[1 + row, query * HEAD + row] = 4
    return {
        "blk.0.attn_q.weight": queries,
        "blk.0.attn_k.weight": keys,
        "blk.0.attn_v.weight": values,
        "blk.0.attn_output.weight": out,
        "blk.0.ffn_down.weight": np.zeros((D, FF)),
    }


def _sizes(layers: int) -> dict[str, Any]:
    return {
        **{"context_length": 512, "embedding_length": D, "block_count": layers},
        **{"feed_forward_length": FF, "attention.head_count": HEADS},
        **{"attention.head_count_kv": KV_HEADS, "attention.layer_norm_rms_epsilon": 1e-5},
        **{"attention.key_length": HEAD, "attention.value_length": HEAD},
        **{"rope.freq_base": 10000.0, "rope.dimension_count": HEAD, "vocab_size": COUNT},
    }


def _write(path: Path, family: str, fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    about = {
        **_sizes(1),
        # One pair of a head turns by half a turn a token.
        **{"rope.scaling.type": "linear", "rope.scaling.factor": 1 / pi},
    }
    own = {f"{family}.{key}": value for key, value in about.items()}
    with gguf_writer(path, family, {**own, **tokenizer_fields("llama"), **fields}) as writer:
        for name, rows in tensors.items():
            # Tokens of rows stay whole numbers.
            writer.add_tensor(name, rows if rows.dtype == np.int64 else rows.astype(np.float32))
    return path


def write_mtp_model(path: Path, *, perfect: bool, seed: int = 1) -> Path:
    """A target with recurrent layers, and an MTP layer in its own file.

    Here the direction of a token's partner is its own with the halves swapped, so that a perfect
    layer makes it of the state before, and adds the token's.
    """
    layers, rng = 4, np.random.default_rng(seed)
    groups, state, ranks = 2, 16, 4
    inner = state * ranks
    swap = np.eye(D)
    swap[1 : 1 + HEAD] = np.roll(swap[1 : 1 + HEAD], HEAD // 2, axis=0)
    rows = _embeddings()
    rows[1::2] = (rows @ swap.T)[::2]
    tensors = {"token_embd.weight": rows, "output.weight": _SCALE * rows[_partners()]}
    tensors["output_norm.weight"] = np.ones(D)

    def add(layer: int, **shapes: tuple[int, ...]) -> None:
        for name, shape in shapes.items():
            values = np.ones(shape) if "norm" in name else rng.normal(0, 0.2, shape)
            tensors[f"blk.{layer}.{name}"] = values

    def weights(**shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    for layer in range(layers + 1):
        add(layer, **weights(attn_norm=(D,), post_attention_norm=(D,)))
        add(layer, **weights(ffn_gate=(FF, D), ffn_up=(FF, D), ffn_down=(D, FF)))
        if (layer + 1) % 4 == 0 or layer == layers:
            kv, q = KV_HEADS * HEAD, HEADS * HEAD
            add(layer, **weights(attn_q=(2 * q, D), attn_k=(kv, D), attn_v=(kv, D)))
            add(layer, **weights(attn_output=(D, q), attn_q_norm=(HEAD,), attn_k_norm=(HEAD,)))
            tensors[f"blk.{layer}.attn_output.weight"] *= layer == layers and not perfect
        else:
            width = 2 * groups * state + inner
            add(layer, **weights(attn_qkv=(width, D), attn_gate=(inner, D), ssm_conv1d=(width, 4)))
            add(layer, **weights(ssm_beta=(ranks, D), ssm_alpha=(ranks, D), ssm_norm=(state,)))
            add(layer, **{"ssm_dt.bias": (ranks,), "ssm_a": (ranks,)})
            tensors[f"blk.{layer}.ssm_out.weight"] = np.zeros((D, inner))
        tensors[f"blk.{layer}.ffn_down.weight"] *= layer == layers and not perfect
    own = f"blk.{layers}.nextn"
    add(layers, **weights(**{"nextn.enorm": (D,), "nextn.hnorm": (D,)}))
    add(layers, **weights(**{"nextn.eh_proj": (D, 2 * D), "nextn.shared_head_norm": (D,)}))
    if perfect:
        tensors[f"{own}.eh_proj.weight"] = np.concatenate([np.eye(D), swap], axis=1)
    about = {
        **_sizes(layers + 1),
        **{"nextn_predict_layers": 1, "full_attention_interval": 4},
        **{"ssm.conv_kernel": 4, "ssm.inner_size": inner, "ssm.state_size": state},
        **{"ssm.time_step_rank": ranks, "ssm.group_count": groups},
        "rope.dimension_sections": [4, 2, 2, 0],
    }
    fields = {f"qwen35.{key}": value for key, value in about.items()}
    with gguf_writer(path, "qwen35", {**fields, **tokenizer_fields("qwen35")}) as writer:
        for name, values in tensors.items():
            writer.add_tensor(name, values.astype(np.float32))
    return path
