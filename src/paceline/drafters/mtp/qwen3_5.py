"""Reads the MTP head inside a Qwen3.5 model: `mtp.*` of a checkpoint, `nextn.*` of a GGUF file.

As vLLM computes it (`qwen3_5_mtp`): the target's hidden state after its final norm and the
embedding of the next token, both normed, go through `fc`, embedding first; then one layer of full
attention as in the target (gated, with norms of queries and keys, heads rotated in part), and a
norm, whose output goes to the target's head and, in a chain, to the next step. llama.cpp measured
that the state after the final norm is the right one (its pull request 24025).

A checkpoint stores every norm's weight less 1. A GGUF file stores it as it is multiplied.
"""

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from paceline.drafters.mtp.checkpoint import Head, HeadConfig, HeadWeights, layer_weights
from paceline.drafters.networks.config import HeadDim, PositiveFloat
from paceline.drafters.networks.tensors import Array, check_tensors, stored_tensors
from paceline.errors import ModelError
from paceline.storage.files import read_json
from paceline.storage.gguf_file import GgufFile, Tensor, read_gguf
from paceline.storage.validation import Count, Limit, Positive, validated

CONFIG = "config.json"
_FAMILY = "qwen35"
_MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Checkpoints that are taken for a Qwen3.5's; the heads of its mixtures are refused by name."""
_METADATA = 64 * 2**20
"""Bytes at the begin of a GGUF file in which tensors are named, at most."""

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Tensors of the layer: name in a checkpoint -> in a GGUF file."""

_AROUND = {
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}
"""Tensors around the layer: name in a checkpoint -> in a GGUF file."""


@dataclass
class _Rope:
    rope_type: Literal["default"] | None = None
    type: Literal["default"] | None = None
    rope_theta: PositiveFloat = 10_000.0
    partial_rotary_factor: Annotated[float, Limit(gt=0, le=1)] = 0.25


@dataclass
class _TextConfig:
    """The fields of the text model's config that decide what the head computes."""

    model_type: Literal["qwen3_5", "qwen3_5_text"]
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    vocab_size: Positive
    mtp_num_hidden_layers: Annotated[int, Limit(ge=1, le=1)]
    rope_parameters: _Rope
    head_dim: HeadDim = 256
    rms_norm_eps: Annotated[float, Limit(ge=0)] = 1e-6
    mtp_use_dedicated_embeddings: Literal[False] = False
    attn_output_gate: Literal[True] = True
    attention_bias: Literal[False] = False
    hidden_act: Literal["silu"] = "silu"


@dataclass
class _GgufFields:
    """The same fields in a GGUF file's metadata."""

    embedding_length: Positive
    feed_forward_length: Positive
    block_count: Annotated[int, Limit(ge=2)]
    nextn_predict_layers: Annotated[int, Limit(ge=1, le=1)]
    head_count: Positive
    head_count_kv: Positive
    key_length: HeadDim
    dimension_count: Count
    freq_base: PositiveFloat
    layer_norm_rms_epsilon: float


def names_head(path: Path) -> bool:
    """Whether a target's metadata name an MTP head of its own.

    `path` is its GGUF file, or the folder of its checkpoint; anything else names none.
    """
    if path.suffix == ".gguf":
        return path.is_file() and _begins_with(path, b".nextn_predict_layers")
    return is_checkpoint(path) and bool(_text_config(path).get("mtp_num_hidden_layers"))


def has_head(path: Path) -> bool:
    """Whether a target has an MTP head that can be used; for `auto`, which must not fail on one.

    Only the values of its tensors are not looked at.
    """
    if not names_head(path):
        return False
    try:
        if path.suffix == ".gguf":
            file = read_gguf(path)
            _gguf_tensors(path, file, _gguf_config(path, file))
        else:
            _tensors(path, checkpoint_config(path), finite=False)
    except ModelError:
        return False
    return True


def is_checkpoint(folder: Path) -> bool:
    """Whether this is the folder of a Qwen3.5 model."""
    return (folder / CONFIG).is_file() and _text_config(folder).get("model_type") in _MODEL_TYPES


def checkpoint_config(folder: Path) -> HeadConfig:
    """The head's shape by a checkpoint's `config.json`. Raises ModelError."""
    file = validated(
        _TextConfig, _text_config(folder), f"{folder / CONFIG} (MTP head)", error=ModelError
    )
    return HeadConfig(
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_attention_heads=file.num_attention_heads,
        num_key_value_heads=file.num_key_value_heads,
        head_dim=file.head_dim,
        rotary_dims=int(file.head_dim * file.rope_parameters.partial_rotary_factor),
        vocab_size=file.vocab_size,
        rms_norm_eps=file.rms_norm_eps,
        rope_theta=file.rope_parameters.rope_theta,
        taps=(file.num_hidden_layers - 1,),
        num_target_layers=file.num_hidden_layers,
        own=True,
    )


def gguf_config(path: Path) -> HeadConfig:
    """The head's shape by a GGUF file's metadata. Raises ModelError."""
    return _gguf_config(path, read_gguf(path))


def _gguf_config(path: Path, file: GgufFile) -> HeadConfig:
    family = file.fields.get("general.architecture")
    if family != _FAMILY:
        raise ModelError(
            f"{path} is a {family} model; expected {_FAMILY}: no other MTP heads inside GGUF files "
            "are known"
        )
    names = ("attention.head_count", "attention.head_count_kv", "attention.key_length")
    keys = [*names, "rope.dimension_count", "rope.freq_base", "attention.layer_norm_rms_epsilon"]
    keys += ["embedding_length", "feed_forward_length", "block_count", "nextn_predict_layers"]
    metadata = {key.split(".")[-1]: file.fields.get(f"{family}.{key}") for key in keys}
    metadata["nextn_predict_layers"] = metadata["nextn_predict_layers"] or 0
    fields = validated(_GgufFields, metadata, f"{path} (MTP head)", error=ModelError)
    embeddings = next(
        (tensor for tensor in file.tensors if tensor.name == "token_embd.weight"), None
    )
    layers = fields.block_count - fields.nextn_predict_layers
    return HeadConfig(
        hidden_size=fields.embedding_length,
        intermediate_size=fields.feed_forward_length,
        num_attention_heads=fields.head_count,
        num_key_value_heads=fields.head_count_kv,
        head_dim=fields.key_length,
        rotary_dims=fields.dimension_count,
        vocab_size=embeddings.shape[0] if embeddings else 0,
        rms_norm_eps=fields.layer_norm_rms_epsilon,
        rope_theta=fields.freq_base,
        taps=(layers - 1,),
        num_target_layers=layers,
        own=True,
    )


def read_head(path: Path, config: HeadConfig) -> Head:
    """Read the weights. Raises ModelError; the message names the faulty tensors."""
    if path.suffix == ".gguf":
        named = _gguf_tensors(path, read_gguf(path), config)
    else:
        named = _tensors(path, config)

    def of(*names: str) -> Array:
        return np.concatenate([named(f"layers.0.{name}") for name in names])

    weights = HeadWeights(
        fuse=named("target_norm"),
        embedding_norm=named("pre_fc_norm_embedding"),
        hidden_norm=named("pre_fc_norm_hidden"),
        join=named("fc"),
        attention_norm=of("input_layernorm"),
        query_norm=of("self_attn.q_norm"),
        key_norm=of("self_attn.k_norm"),
        norm=named("norm"),
        **layer_weights(of, config.num_attention_heads),
    )
    return Head(path, config, weights, None)


def _tensors(folder: Path, config: HeadConfig, *, finite: bool = True) -> Callable[[str], Array]:
    """Reads a tensor of a checkpoint by its name after `mtp.`; `target_norm` is the target's.

    `finite` checks all numbers.
    """
    stored = stored_tensors(folder)
    if any(
        name.endswith("conv1d.weight") and tensor.shape[-1] == 1 for name, tensor in stored.items()
    ):
        raise ModelError(
            f"{folder} was converted for MLX, which stores norms in another way; name the original "
            "checkpoint for its MTP head: mtp:FOLDER"
        )
    norms = [name for name in stored if name.endswith("model.norm.weight")]
    norms += [name for name in stored if name.endswith("language_model.norm.weight")]
    tensors = {name: stored[name] for name in stored if name.startswith("mtp.")}
    if not tensors:
        raise ModelError(
            f"{folder} names an MTP head in its {CONFIG} and has no tensors mtp.*; whoever "
            "converted it left them out: name the original checkpoint, mtp:FOLDER"
        )
    names = {f"mtp.{name}.weight": shape for name, shape in _shapes(config).items()}
    names["mtp.target_norm.weight"] = (config.hidden_size,)
    if norms:
        tensors["mtp.target_norm.weight"] = stored[norms[0]]
    check_tensors(folder, names, tensors, finite=finite)

    def read(name: str) -> Array:
        values = tensors[f"mtp.{name}.weight"].floats()
        return values + 1 if values.ndim == 1 else values

    return read


def _gguf_tensors(path: Path, file: GgufFile, config: HeadConfig) -> Callable[[str], Array]:
    """Reads a tensor of a GGUF file by its name in a checkpoint."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    stored: Mapping[str, Tensor] = {tensor.name: tensor for tensor in file.tensors}
    block = f"blk.{config.num_target_layers}."
    names = {name: f"{block}{inside}.weight" for name, inside in _AROUND.items()}
    names |= {f"layers.0.{name}": f"{block}{inside}.weight" for name, inside in _LAYER.items()}
    names["target_norm"] = "output_norm.weight"
    faults = []
    for name, shape in {**_shapes(config), "target_norm": (config.hidden_size,)}.items():
        if names[name] not in stored:
            faults.append(f"{names[name]} is missing")
        elif tuple(stored[names[name]].shape) != shape:
            faults.append(
                f"{names[name]} is {list(stored[names[name]].shape)}, expected {list(shape)}"
            )
    if faults:
        raise ModelError(f"the MTP head in {path} cannot be used: {'; '.join(faults[:5])}")

    def read(name: str) -> Array:
        tensor = stored[names[name]]
        kind = GGMLQuantizationType(tensor.kind)
        values: Array = dequantize(_typed(tensor.data, kind), kind).astype(np.float32)
        return values.reshape(tensor.shape)

    return read


def _typed(data: Any, kind: Any) -> Any:
    """Bytes as `gguf.quants.dequantize` takes them: numbers where the type has numpy's."""
    from gguf import GGMLQuantizationType

    numbers = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    return data.view(numbers[kind]) if kind in numbers else data


def _shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Name without `mtp.` and `.weight` -> shape of every tensor."""
    d, ff, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * hd, config.num_key_value_heads * hd
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (2 * q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "self_attn.q_norm": (hd,),
        "self_attn.k_norm": (hd,),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (ff, d),
        "mlp.up_proj": (ff, d),
        "mlp.down_proj": (d, ff),
    }
    return {
        "fc": (d, 2 * d),
        "pre_fc_norm_embedding": (d,),
        "pre_fc_norm_hidden": (d,),
        "norm": (d,),
        **{f"layers.0.{name}": shape for name, shape in layer.items()},
    }


def _text_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / CONFIG)
    text = config.get("text_config", config)
    return text if isinstance(text, dict) else {}


def _begins_with(path: Path, text: bytes) -> bool:
    """Whether the first part of a GGUF file, where its metadata are, has this text."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text, 0, _METADATA) >= 0
