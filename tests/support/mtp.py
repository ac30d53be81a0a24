"""Random heads of `mtp` in all forms, under the names of published files; perfect heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.storage.files import write_json
from support.dflash import LEFT_OUT, write_tensors

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class HeadForm:
    own: bool = False
    """Whether it is Qwen3.5's, not EAGLE-3's."""
    deepspec: bool = False
    """Whether EAGLE-3's is in DeepSpec's form."""
    d: int = 64
    ff: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary: float = 1.0
    vocab: int = 320
    drafted: Sequence[int] | None = None
    """The tokens that are drafted; None: all, by the target's head."""
    taps: Sequence[int] = (0, 1)
    layers: int = 2
    theta: float = 10_000.0
    epsilon: float = 1e-5

    @property
    def layer(self) -> str:
        return "layers.0." if self.deepspec else "midlayer."


def config_json(form: HeadForm) -> dict[str, Any]:
    """config.json; of Qwen3.5 the model's."""
    sizes = {
        "hidden_size": form.d,
        "intermediate_size": form.ff,
        "num_attention_heads": form.heads,
        "num_key_value_heads": form.kv_heads,
        "head_dim": form.head_dim,
        "rms_norm_eps": form.epsilon,
        "vocab_size": form.vocab,
    }
    if form.own:
        rope = {"rope_theta": form.theta, "partial_rotary_factor": form.rotary}
        text = {"model_type": "qwen3_5_text", "num_hidden_layers": form.layers, **sizes}
        text |= {"mtp_num_hidden_layers": 1, "rope_parameters": rope}
        return {"model_type": "qwen3_5", "text_config": text}
    if form.deepspec:
        return {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "num_hidden_layers": 1,
            "draft_num_hidden_layers": 1,
            "rope_parameters": {"rope_theta": form.theta, "rope_type": "default"},
            "tie_word_embeddings": False,
            "target_layer_ids": list(form.taps),
            "num_target_layers": form.layers,
            "ttt_length": 7,
            **sizes,
        }
    drafted = {} if form.drafted is None else {"draft_vocab_size": len(form.drafted)}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": form.theta,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(form.taps)},
        **sizes,
        **drafted,
    }


def shapes(form: HeadForm) -> dict[str, tuple[int, ...]]:
    d, ff, q, kv = form.d, form.ff, form.heads * form.head_dim, form.kv_heads * form.head_dim
    prefix, width = ("mtp.layers.0.", d) if form.own else (form.layer, 2 * d)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
        "self_attn.q_proj": (2 * q if form.own else q, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (ff, d),
        "mlp.up_proj": (ff, d),
        "mlp.down_proj": (d, ff),
    }
    if form.own:
        hd = (form.head_dim,)
        layer |= {"self_attn.q_norm": hd, "self_attn.k_norm": hd}
        around = {
            "mtp.fc": (d, 2 * d),
            "mtp.pre_fc_norm_embedding": (d,),
            "mtp.pre_fc_norm_hidden": (d,),
            "mtp.norm": (d,),
            "model.language_model.norm": (d,),
        }
    else:
        layer["hidden_norm"] = (d,)
        if form.deepspec:
            layer |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (form.head_dim,))
        around = {"fc": (d, len(form.taps) * d), "norm": (d,)}
        if form.drafted is not None:
            around["lm_head"] = (len(form.drafted), d)
    named = {**around, **{prefix + name: shape for name, shape in layer.items()}}
    return {f"{name}.weight": shape for name, shape in named.items()}


def random_weights(form: HeadForm, seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes(form).items():
        around = 0.0 if form.own or len(shape) == 2 else 1.0
        spread = 0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        weights[name] = rng.normal(around, spread, shape).astype(np.float32)
    return weights


def write_head(
    folder: Path,
    form: HeadForm,
    weights: Weights | None = None,
    *,
    change: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    kind: str = "F32",
) -> Weights:
    """Write a head, and return its weights as they can be read.

    Args:
        folder: made when needed; for Qwen3.5 only the head's files are written.
        form: its sizes.
        weights: None: random ones.
        change: what config.json says otherwise; `LEFT_OUT` leaves an entry out.
        tensors: tensors that are otherwise; `LEFT_OUT` leaves one out.
        kind: type of the tensors in the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config_json(form)
    inner = config["text_config"] if form.own else config
    inner |= change or {}
    for name in [name for name, value in inner.items() if value is LEFT_OUT]:
        del inner[name]
    write_json(folder / "config.json", config)
    all_of = {**(random_weights(form) if weights is None else weights), **(tensors or {})}
    stored: dict[str, Any] = {n: rows for n, rows in all_of.items() if rows is not LEFT_OUT}
    whole = {}
    if form.drafted is not None and not form.own:
        drafted = np.array(form.drafted)
        whole = {
            "d2t": drafted - np.arange(len(drafted)),
            "t2d": np.isin(range(form.vocab), drafted),
        }
    differences = {"d2t": stored.pop("d2t")} if "d2t" in stored else {}
    whole = {n: rows for n, rows in whole.items() if n not in (tensors or {})} | differences
    return write_tensors(folder / "model.safetensors", stored, kind, whole)


# -- a target that repeats rounds of eight tokens, and heads for them -----------------------------

ROUND = 8
"""After token t comes `next_in_round(t)`, whatever came before."""


def next_in_round(token: int) -> int:
    return token // ROUND * ROUND + (token + 1) % ROUND


class Rounds:
    """Embeddings where the next token's is the token's, rotated.

    Entry 0 is the same for every token, and all have the same length, so that a norm is a factor.
    """

    def __init__(self, vocab: int = 320, d: int = 64) -> None:
        rng = np.random.default_rng(5)
        planes = (d - 1) // 2
        self.turn = np.zeros((d, d))
        """[d, d]: embedding of a token -> of the next one."""
        self.turn[0, 0] = 1
        for plane in range(planes):
            angle = 2 * np.pi / ROUND * rng.choice([1, 3, 5, 7])
            at = 1 + 2 * plane
            c, s = np.cos(angle), np.sin(angle)
            self.turn[at : at + 2, at : at + 2] = [[c, -s], [s, c]]
        firsts = np.zeros((-(-vocab // ROUND), d))
        firsts[:, 1 : 1 + 2 * planes] = rng.normal(size=(len(firsts), 2 * planes))
        firsts *= np.sqrt(d - 1) / np.linalg.norm(firsts, axis=1, keepdims=True)
        firsts[:, 0] = 1
        rows, turned = [], firsts
        for _ in range(ROUND):
            rows.append(turned)
            turned = turned @ self.turn.T
        self.embeddings = np.stack(rows, 1).reshape(-1, d)[:vocab].astype(np.float32)
        """[vocab, d], each of length sqrt(d)."""
        self.head = (self.embeddings @ self.turn).astype(np.float32)
        """[vocab, d]: best for the token after the one whose embedding it gets."""


def perfect_weights(form: HeadForm, rounds: Rounds, *, reads: str) -> Weights:
    """Weights of a head that is right after every context.

    `reads` is all that it looks at: the `hidden` state of a position, or the `token` after it. Fed
    with those of another position it is always wrong.
    """
    weights = {name: np.zeros(shape, np.float32) for name, shape in shapes(form).items()}
    d, identity = form.d, np.eye(form.d)
    if form.own:  # the layer adds nothing
        parts = [identity, 0 * identity] if reads == "token" else [0 * identity, rounds.turn]
        weights["mtp.fc.weight"][:] = np.concatenate(parts, 1)
        return weights
    for name, rows in weights.items():
        if rows.ndim == 1:
            weights[name] = np.ones_like(rows)
    weights["lm_head.weight"][:] = rounds.head
    if reads == "hidden":  # through the layer's feed-forward: stream + (turn - 1) stream
        weights["fc.weight"][:, :d] = identity
        weights["midlayer.mlp.gate_proj.weight"][:d, 0] = 20  # swish(20 * entry 0) is 20
        weights["midlayer.mlp.up_proj.weight"][:d] = rounds.turn - identity
        weights["midlayer.mlp.down_proj.weight"][:, :d] = identity / 20
        return weights
    # Through attention to the row itself alone: stream + embedding - stream. Queries and keys are
    # the same for all rows, so a score falls with the distance; values have both halves of d.
    size, heads, kv_heads = form.head_dim, form.heads, form.kv_heads
    weights["midlayer.self_attn.q_proj.weight"][:, 0] = 60
    weights["midlayer.self_attn.k_proj.weight"][:, 0] = 60
    part = np.zeros((kv_heads * size, 2 * d))
    assert kv_heads * size == d
    assert heads == kv_heads
    part[:, :d], part[:, d:] = identity, -identity
    weights["midlayer.self_attn.v_proj.weight"][:] = part
    weights["midlayer.self_attn.o_proj.weight"][:] = identity
    return weights
