"""Reads the MTP head inside a Qwen3.5 checkpoint: its `mtp.*` tensors.

The computation is vLLM's (`qwen3_5_mtp`). `fc` reads the next token's embedding, then the target's
hidden state after its final norm, both normalized. Then come a full-attention layer like the
target's (gated, with norms of queries and keys, heads rotated in part) and a norm. Its output goes
to the target's head and, in a chain, to the next step. llama.cpp measured that the state after the
final norm is the right one (its pull request 24025).

A checkpoint stores every norm's weight minus 1.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from paceline.errors import ModelError
from paceline.storage.files import read_text_config
from paceline.storage.validation import Limit, Positive, validated
from paceline_mlx.heads.config import CONFIG, HeadDim, HeadFile, PositiveFloat, with_fields_of
from paceline_mlx.heads.mtp.head import ChainConfig, HeadWeights
from paceline_mlx.heads.weights import Weights, check_tensors, stored_tensors
from paceline_mlx.hooks import Array

_MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types treated as Qwen3.5; heads of its mixture-of-experts models raise an error."""


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
    """Return whether a target has a usable MTP head; for `auto`, which must not fail on one.

    Checks everything but the values of its tensors.
    """
    if not (is_checkpoint(folder) and read_text_config(folder).get("mtp_num_hidden_layers")):
        return False
    try:
        _tensors(folder, read_config(folder), finite=False)
    except ModelError:
        return False
    return True


def is_checkpoint(folder: Path) -> bool:
    is_folder = (folder / CONFIG).is_file()
    return is_folder and read_text_config(folder).get("model_type") in _MODEL_TYPES


def read_config(folder: Path) -> ChainConfig:
    """Return the head's config from a checkpoint's `config.json`. Raises ModelError."""
    file = validated(
        _TextConfig, read_text_config(folder), f"{folder / CONFIG} (MTP head)", error=ModelError
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
    """Return the head's tensors by name without `mtp.`; `target_norm` is the target's final norm.

    `finite`: check that all values are finite.
    """
    import mlx.core as mx

    stored = stored_tensors(folder)
    if any(
        name.endswith("conv1d.weight") and tensor.shape[-1] == 1 for name, tensor in stored.items()
    ):
        raise ModelError(
            f"{folder} was converted for MLX, which stores norms differently; pass the original "
            "checkpoint for its MTP head: mtp:FOLDER"
        )
    tensors = {name: stored[name] for name in stored if name.startswith("mtp.")}
    if not tensors:
        raise ModelError(
            f"{folder} has an MTP head in its {CONFIG} but no mtp.* tensors: the conversion left "
            "them out; pass the original checkpoint: mtp:FOLDER"
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
    """Return name without `mtp.` -> shape for every tensor."""
    d = config.hidden_size
    return {
        "fc.weight": (d, 2 * d),
        "pre_fc_norm_embedding.weight": (d,),
        "pre_fc_norm_hidden.weight": (d,),
        "norm.weight": (d,),
        "target_norm.weight": (d,),
        **{f"layers.0.{name}": shape for name, shape in config.layer_shapes(d, gated=True).items()},
    }
