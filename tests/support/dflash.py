"""Random DFlash checkpoints for the tiny target, and the architecture once more, in plain numpy.

`reference_draft` is written from the paper (arXiv 2602.06036), for one block and in float64; it
shares nothing with the network.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline_mlx.heads.dflash.checkpoint import Config
from support import mlx
from support.checkpoints import stored, write_safetensors

Weights = dict[str, np.ndarray]

MASK = 319
"""An unused token of the tiny target."""


class _LeftOut:
    def __repr__(self) -> str:  # the name of a test is made of it
        return "LEFT_OUT"


LEFT_OUT: Any = _LeftOut()
"""Instead of a value in config.json, or of a tensor: it is not there."""


def tiny_config(**changes: Any) -> Config:
    """A drafter for a target of `ENDS`: two layers, two taps, blocks of eight rows."""
    layers = changes.get("num_hidden_layers", 2)
    config = Config(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=320,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        block_size=8,
        num_target_layers=2,
        target_layer_ids=(0, 1),
        mask_token_id=MASK,
        windows=(None,) * layers,
    )
    return replace(config, **changes)


def random_weights(config: Config, seed: int = 0) -> Weights:
    """Norms around 1; matrices that keep the size of what goes through them.

    Some norms are larger, so that attention prefers some rows and the head some tokens.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, size in config.shapes().items():
        around, spread = (1.0, 0.2) if len(size) == 1 else (0.0, size[-1] ** -0.5)
        weights[name] = rng.normal(around, spread, size).astype(np.float32)
    for name, rows in weights.items():
        if name.endswith("q_norm.weight"):
            np.multiply(rows, 2, out=rows)
        if name.endswith(("_codebook", "markov_w1.weight", "markov_w2.weight")):
            np.multiply(rows, 4, out=rows)
        if name.endswith("base_kernel"):
            rows[:, 0] += 1
    weights["norm.weight"] *= 2
    return weights


def write_checkpoint(
    folder: Path,
    config: Config,
    seed: int = 0,
    *,
    kind: str = "BF16",
    change: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    prefix: str = "",
    files: int = 1,
) -> Weights:
    """Write a random checkpoint in z-lab's form, and return its weights as they can be read.

    Args:
        folder: made when needed.
        config: the shape of the network.
        seed: of the weights.
        kind: their type in the file.
        change: what config.json says otherwise; `LEFT_OUT` leaves an entry out.
        tensors: tensors that are otherwise; `LEFT_OUT` leaves one out.
        prefix: stands before each name.
        files: how many files the tensors are spread over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**config_json(config), **(change or {})}
    write_config(folder, {name: value for name, value in settings.items() if value is not LEFT_OUT})
    weights = {**random_weights(config, seed), **(tensors or {})}
    weights = {name: rows for name, rows in weights.items() if rows is not LEFT_OUT}
    names = list(weights)
    for number in range(files):
        name = "model" if files == 1 else f"model-{number + 1:05}-of-{files:05}"
        part = {prefix + tensor: weights[tensor] for tensor in names[number::files]}
        write_tensors(folder / f"{name}.safetensors", part, kind)
    return {name: _rounded(rows, kind) for name, rows in weights.items()}


def write_config(folder: Path, value: Any) -> None:
    (folder / "config.json").write_text(json.dumps(value))


def config_json(config: Config) -> dict[str, Any]:
    """The words of z-lab's own files, as far as they say something about the network."""
    counts = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim vocab_size rms_norm_eps rope_theta block_size num_target_layers"
    )
    sliding = [window is not None for window in config.windows]
    if config.first_drafted == 0:
        return _dspark_json(config)
    settings: dict[str, Any] = {
        **{name: getattr(config, name) for name in counts.split()},
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "hidden_act": "silu",
        "layer_types": ["sliding_attention" if item else "full_attention" for item in sliding],
        "model_type": "qwen3",
        "rope_scaling": config.llama3_rope
        and {"rope_type": "llama3", **asdict(config.llama3_rope)},
        "sliding_window": next(filter(None, config.windows), None),
    }
    inner = settings["dflash_config"]
    if config.causal is not None:
        settings["is_causal"] = config.causal
    if config.convolution is not None and config.chain is not None:
        settings["architectures"] = ["DFlash2DraftModel"]
        inner |= {
            "block_size": settings.pop("block_size"),
            "conv_kernel_size": config.convolution.taps,
            "conv_group_size": config.convolution.group,
            "selector_rank": config.chain.rank,
            "selector_top_k": config.chain.candidates,
        }
    if config.logit_cap is not None:
        inner |= {
            "input_embedding_scale": config.embedding_scale,
            "output_multiplier": config.logit_scale,
            "final_logit_softcapping": config.logit_cap,
        }
    return settings


def _dspark_json(config: Config) -> dict[str, Any]:
    """The words of DeepSpec's files: those of the target's Qwen3, and its own at the top."""
    plain = replace(config, first_drafted=1, causal=None, chain=None)
    settings = {**config_json(plain), "architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    settings |= settings.pop("dflash_config")
    chain = config.chain
    settings["markov_rank"] = chain.rank if chain else 0
    settings["enable_confidence_head"] = bool(chain and chain.confidence)
    if chain and chain.kind != "none":
        settings["markov_head_type"] = chain.kind
    if chain and chain.confidence:
        settings["confidence_head_with_markov"] = chain.confidence_reads_draft
    return settings


def write_tensors(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    kind: str,
    whole: Mapping[str, np.ndarray] | None = None,
) -> Weights:
    """Write a file; `whole` are int64 or bool. Returns `tensors` as they can be read."""
    write_safetensors(path, {**tensors, **(whole or {})}, kind)
    return {name: _rounded(rows, kind) for name, rows in tensors.items()}


def _rounded(rows: np.ndarray, kind: str) -> np.ndarray:
    if kind == "BF16":
        return (stored(rows, kind).astype(np.uint32) << 16).view(np.float32)
    return stored(rows, kind).astype(np.float32)


class Ends(NamedTuple):
    """What a drafter has from its target."""

    embeddings: np.ndarray
    """[vocab, d]"""
    head: np.ndarray
    """[vocab, d]"""


def _ends() -> Ends:
    rng = np.random.default_rng(9)
    return Ends(rng.normal(size=(320, 64)) / 8, rng.normal(size=(320, 64)) / 4)


ENDS = _ends()
"""Of a target of two layers, for heads that are compared with a reference."""


class Drafted(NamedTuple):
    """What a block says."""

    tokens: list[int]
    """A token for each row that drafts."""
    chances: list[float]
    margins: list[float]
    """For each token, how far its logit is ahead of the next."""
    hidden: np.ndarray
    """[block_size, d], after the last norm."""
    logits: np.ndarray
    """[drafts, drafted tokens]; of a chain's tokens that are no candidates -inf."""


def reference_draft(
    config: Config,
    weights: Mapping[str, np.ndarray],
    ends: Ends,
    features: np.ndarray,
    token: int,
    position: int,
    *,
    positions: Sequence[int] | None = None,
    chosen: Sequence[int] = (),
) -> Drafted:
    """A block that begins with `token` at `position`.

    Args:
        config: the shape of the network.
        weights: its tensors.
        ends: the target's.
        features: [n, taps * d] of the context.
        token: the block's first.
        position: where it stands.
        positions: where the rows of the context stand; None: from 0 on.
        chosen: tokens with which a chain goes on instead of the best ones.
    """
    w = {name: np.asarray(rows, np.float64) for name, rows in weights.items()}
    heads, kv_heads, hd = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    block = config.block_size

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.mean(x**2, axis=-1, keepdims=True)
        return w[f"{name}.weight"] * x / np.sqrt(mean_square + config.rms_norm_eps)

    def rotate(x: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Each pair (x[i], x[i + hd / 2]) is a point that is turned by place * theta^(-2i / hd)."""
        point = x[..., : hd // 2] + 1j * x[..., hd // 2 :]
        angle = places[:, None, None] * np.array([_turned(config, i) for i in range(hd // 2)])
        turned = point * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    before = np.arange(len(features)) if positions is None else np.array(positions, int)
    block_places = position + np.arange(block)
    everywhere = np.concatenate([before, block_places])
    context = norm(np.asarray(features, np.float64) @ w["fc.weight"].T, "hidden_norm")
    x = ends.embeddings[[token, *[config.mask_token_id] * (block - 1)]] * config.embedding_scale
    for at, window in enumerate(config.windows):
        name = f"layers.{at}"
        normed = norm(x, f"{name}.input_layernorm")
        around = _Convolved(config, w, f"{name}.attention_conv", normed)
        normed = around.input
        seen = np.concatenate([context, normed])
        project = f"{name}.self_attn.{{}}_proj.weight"
        q = (normed @ w[project.format("q")].T).reshape(block, heads, hd)
        k = (seen @ w[project.format("k")].T).reshape(len(seen), kv_heads, hd)
        v = (seen @ w[project.format("v")].T).reshape(len(seen), kv_heads, hd)
        q = rotate(norm(q, f"{name}.self_attn.q_norm"), block_places)
        k = rotate(norm(k, f"{name}.self_attn.k_norm"), everywhere)
        may_look = np.full((block, len(seen)), True)
        if window is not None:
            may_look &= np.abs(block_places[:, None] - everywhere[None]) < window
        if config.causal or (config.causal is None and window is not None):
            may_look &= everywhere[None] <= block_places[:, None]
        mixed = np.zeros((block, heads, hd))
        for one in range(heads):
            theirs = one * kv_heads // heads
            scores = q[:, one] @ k[:, theirs].T / np.sqrt(hd)
            share = np.where(may_look, np.exp(scores - scores.max(axis=1, keepdims=True)), 0)
            mixed[:, one] = share / share.sum(axis=1, keepdims=True) @ v[:, theirs]
        x = x + around.output(mixed.reshape(block, heads * hd) @ w[project.format("o")].T)
        normed = norm(x, f"{name}.post_attention_layernorm")
        around = _Convolved(config, w, f"{name}.mlp_conv", normed)
        normed = around.input
        gate = normed @ w[f"{name}.mlp.gate_proj.weight"].T
        up = normed @ w[f"{name}.mlp.up_proj.weight"].T
        x = x + around.output(
            (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.mlp.down_proj.weight"].T
        )
    hidden = norm(x, "norm")
    out = hidden[config.first_drafted :]
    logits = out @ ends.head.T * config.logit_scale
    if config.logit_cap is not None:
        logits = np.tanh(logits / config.logit_cap) * config.logit_cap
    confidence = None
    if config.chain is not None:
        logits, confidence = _chained(config, w, out, logits, token, chosen)
    best = logits.argmax(axis=1)
    chances = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    if confidence is not None:
        chances = np.array(confidence)
    second, first = np.sort(logits, axis=1)[:, -2:].T
    return Drafted(best.tolist(), chances.tolist(), (first - second).tolist(), hidden, logits)


def _turned(config: Config, pair: int) -> float:
    """Radians by which a pair is turned at each place; see `_compute_llama3_parameters`."""
    speed = config.rope_theta ** (-2 * pair / config.head_dim)
    rope = config.llama3_rope
    if rope is None:
        return float(speed)
    length = 2 * np.pi / speed
    if length < rope.original_max_position_embeddings / rope.high_freq_factor:
        return float(speed)
    if length > rope.original_max_position_embeddings / rope.low_freq_factor:
        return float(speed / rope.factor)
    smooth = rope.original_max_position_embeddings / length - rope.low_freq_factor
    smooth /= rope.high_freq_factor - rope.low_freq_factor
    return float((1 - smooth) * speed / rope.factor + smooth * speed)


class _Convolved:
    """A sublayer's input and output, as DFlash 2 convolves them over the rows of a block."""

    def __init__(self, config: Config, w: Weights, name: str, rows: np.ndarray) -> None:
        self._form, self.input = config.convolution, rows
        if self._form is None:
            return
        dynamic = rows @ w[f"{name}.kernel_projection.weight"].T
        dynamic = dynamic.reshape(len(rows), 2, self._form.taps, -1)
        self._kernels = [
            w[f"{name}.base_kernel"][side] + np.repeat(dynamic[:, side], self._form.group, axis=-1)
            for side in (0, 1)
        ]
        self.input = self._convolve(rows, self._kernels[0])

    def output(self, rows: np.ndarray) -> np.ndarray:
        return rows if self._form is None else self._convolve(rows, self._kernels[1])

    def _convolve(self, rows: np.ndarray, kernels: np.ndarray) -> np.ndarray:
        result = np.zeros_like(rows)
        for row in range(len(rows)):
            for tap in range(min(kernels.shape[1], row + 1)):
                result[row] += kernels[row, tap] * rows[row - tap]
        return result


def _chained(
    config: Config,
    w: Weights,
    hidden: np.ndarray,
    logits: np.ndarray,
    token: int,
    chosen: Sequence[int],
) -> tuple[np.ndarray, list[float] | None]:
    """Logits after the draft before, and confidences: DeepSpec's markov_head.py, z-lab's selector.

    Written over the whole vocabulary; then all but the candidates are left out.
    """
    chain = config.chain
    assert chain is not None
    results, confidences = [], []
    state = np.zeros(chain.rank)

    def head(name: str, x: np.ndarray) -> np.ndarray:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    for at, (h, row) in enumerate(zip(hidden, logits, strict=True)):
        bias, before = np.zeros(config.vocab_size), np.zeros(0)
        if chain.kind == "selector":
            gate = w["candidate_selector.hidden_projection.weight"] @ h
            edge = w["candidate_selector.predecessor_codebook"][token] * gate
            bias = w["candidate_selector.successor_codebook"] @ edge
        elif chain.kind != "none":
            before = w["markov_head.markov_w1.weight"][token]
            latent = before
            if chain.kind == "gated":
                latent = sigmoid(head("markov_head.gate_proj", np.append(h, before))) * before
            elif chain.kind == "rnn":
                joint = np.concatenate([state, before, h])
                g, c, o = head("markov_head.joint_proj", joint).reshape(3, -1)
                state = sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c)
                latent = np.tanh(o)
            bias = w["markov_head.markov_w2.weight"] @ latent
        if chain.confidence:
            features = np.append(h, before) if chain.confidence_reads_draft else h
            confidences.append(float(sigmoid(head("confidence_head.proj", features))[0]))
        scores = np.full(len(row), -np.inf)
        kept = np.argsort(row)[-chain.candidates :]
        scores[kept] = row[kept] + bias[kept]
        results.append(scores)
        token = chosen[at] if chosen else int(scores.argmax())
    return np.array(results), confidences or None


def parts(rows: np.ndarray, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Rows in parts of `size`, each with where it begins."""
    for start in range(0, len(rows), size):
        yield start, rows[start : start + size]


def config_for(engine: Any, **changes: Any) -> Config:
    """A drafter that fits a target in MLX, with a sliding layer."""
    config = Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=mlx.VOCAB,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        block_size=12,
        num_target_layers=engine.model.layers,
        target_layer_ids=engine.taps,
        mask_token_id=mlx.VOCAB - 1,
        windows=(None, 16),
    )
    return replace(config, **changes)
