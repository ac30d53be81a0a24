"""Reads the MTP head inside a Qwen3.5 checkpoint: its tensors `mtp.*`.

As vLLM computes it (`qwen3_5_mtp`): the target's hidden state after its final norm and the
embedding of the next token, both normed, go through `fc`, embedding first; then one layer of full
attention as in the target (gated, with norms of queries and keys, heads rotated in part), and a
norm, whose output goes to the target's head and, in a chain, to the next step. llama.cpp measured
that the state after the final norm is the right one (its pull request 24025).

A checkpoint stores every norm's weight less 1.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from paceline.errors import ModelError
from paceline.storage.files import read_json
from paceline.storage.validation import Limit, Positive, validated
from paceline_mlx.heads.config import CONFIG, HeadDim, HeadFile, PositiveFloat, with_fields_of
from paceline_mlx.heads.mtp.head import ChainConfig, HeadWeights
from paceline_mlx.heads.weights import Weights, check_tensors, stored_tensors
from paceline_mlx.hooks import Array

_MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Checkpoints that are taken for a Qwen3.5's; the heads of its mixtures are refused by name."""


@dataclass
class _Rope:
    rope_type: Literal["default"] | None = None
    type: Literal["default"] | None = None
    rope_theta: PositiveFloat = 10_000.0
    partial_rotary_factor: Annotated[float, Limit(gt=0, le=1)] = 0.25


@dataclass(kw_only=True)
class _TextConfig(HeadFile):
    model_type: Literal["qwen3_5", "qwen3_5_text"]
    num_hidden_layers: Positive
    num_key_value_heads: Positive
    mtp_num_hidden_layers: Annotated[int, Limit(ge=1, le=1)]
    rope_parameters: _Rope
    head_dim: HeadDim = 256
    mtp_use_dedicated_embeddings: Literal[False] = False
    attn_output_gate: Literal[True] = True


def has_head(folder: Path) -> bool:
    """Whether a target has an MTP head that can be used; for `auto`, which must not fail on one.

    Only the values of its tensors are not looked at.
    """
    if not (is_checkpoint(folder) and _text_config(folder).get("mtp_num_hidden_layers")):
        return False
    try:
        _tensors(folder, read_config(folder), finite=False)
    except ModelError:
        return False
    return True


def is_checkpoint(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and _text_config(folder).get("model_type") in _MODEL_TYPES


def read_config(folder: Path) -> ChainConfig:
    """The head's shape by a checkpoint's `config.json`. Raises ModelError."""
    file = validated(
        _TextConfig, _text_config(folder), f"{folder / CONFIG} (MTP head)", error=ModelError
    )
    rope, layers = file.rope_parameters, file.num_hidden_layers
    return with_fields_of(
        ChainConfig,
        file,
        rotary_dims=int(file.head_dim * rope.partial_rotary_factor),
        rope_theta=rope.rope_theta,
        taps=(layers - 1,),
        num_target_layers=layers,
        own=True,
    )


def read_weights(folder: Path, config: ChainConfig, dtype: Any, bits: int | None) -> HeadWeights:
    weights = Weights(_tensors(folder, config), dtype, bits)
    return HeadWeights(
        fuse=weights.vector("target_norm"),
        embedding_norm=weights.vector("pre_fc_norm_embedding"),
        hidden_norm=weights.vector("pre_fc_norm_hidden"),
        layer=weights.layer("layers.0.", gated_heads=config.num_attention_heads),
        norm=weights.vector("norm"),
        join=weights.matrix("fc"),
    )


def _tensors(folder: Path, config: ChainConfig, *, finite: bool = True) -> dict[str, Array]:
    """The head's tensors by their names after `mtp.`; `target_norm` is the target's last norm.

    `finite` checks all numbers.
    """
    import mlx.core as mx

    stored = stored_tensors(folder)
    if any(
        name.endswith("conv1d.weight") and tensor.shape[-1] == 1 for name, tensor in stored.items()
    ):
        raise ModelError(
            f"{folder} was converted for MLX, which stores norms in another way; name the original "
            "checkpoint for its MTP head: mtp:FOLDER"
        )
    tensors = {name: stored[name] for name in stored if name.startswith("mtp.")}
    if not tensors:
        raise ModelError(
            f"{folder} names an MTP head in its {CONFIG} and has no tensors mtp.*; whoever "
            "converted it left them out: name the original checkpoint, mtp:FOLDER"
        )
    for name in stored:
        if name.endswith(("model.norm.weight", "language_model.norm.weight")):
            tensors["mtp.target_norm.weight"] = stored[name]
    shapes = {f"mtp.{name}": shape for name, shape in _shapes(config).items()}
    check_tensors(folder, shapes, tensors, finite=finite)
    return {
        name.removeprefix("mtp."): values.astype(mx.float32) + 1 if values.ndim == 1 else values
        for name, values in tensors.items()
    }


def _shapes(config: ChainConfig) -> dict[str, tuple[int, ...]]:
    """Name without `mtp.` -> shape of every tensor."""
    d = config.hidden_size
    return {
        "fc.weight": (d, 2 * d),
        "pre_fc_norm_embedding.weight": (d,),
        "pre_fc_norm_hidden.weight": (d,),
        "norm.weight": (d,),
        "target_norm.weight": (d,),
        **{f"layers.0.{name}": shape for name, shape in config.layer_shapes(d, gated=True).items()},
    }


def _text_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / CONFIG)
    text = config.get("text_config", config)
    return text if isinstance(text, dict) else {}
