"""Random DFlash checkpoints for tiny targets."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline_mlx.heads.dflash.checkpoint import Config
from support import mlx
from support.checkpoints import stored, write_safetensors

Weights = dict[str, np.ndarray]

MASK = 319


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
        taps=(0, 1),
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
    inner: str | None = None,
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
        inner: the entry of config.json that `change` changes; None: config.json itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = config_json(config)
    changed = settings if inner is None else settings[inner]
    changed |= change or {}
    for name in [name for name, value in changed.items() if value is LEFT_OUT]:
        del changed[name]
    write_config(folder, settings)
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
            "target_layer_ids": list(config.taps),
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
    if config.final_logit_softcapping is not None:
        for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
            inner[name] = getattr(config, name)
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


def config_for(engine: Any, **changes: Any) -> Config:
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
        taps=engine.taps,
        mask_token_id=mlx.VOCAB - 1,
        windows=(None, 16),
    )
    return replace(config, **changes)
