"""Reads a DFlash checkpoint: `config.json` and safetensors, as z-lab publishes them.

Every fault of a checkpoint, or of a drafter for another target, is named in one error before
anything is computed.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from paceline.drafters.networks.config import HeadDim, One, PositiveFloat, Rope
from paceline.drafters.networks.tensors import (
    Array,
    StoredTensor,
    check_tensors,
    stored_tensors,
)
from paceline.errors import ModelError
from paceline.storage.files import read_json
from paceline.storage.validation import Count, Limit, Positive, listed, validated

ARCHITECTURE: Literal["DFlashDraftModel"] = "DFlashDraftModel"
CONFIG = "config.json"
DRAFT_VOCAB = "draft_vocab.npy"
"""Optional, Paceline's own addition: the tokens that are drafted, ascending."""

_NotEmpty = Limit(min_length=1)


@dataclass(frozen=True, slots=True)
class Config:
    """Shape of a DFlash network."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    """Rows of a block: the last token and block_size - 1 draft tokens."""
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    """Layers of the target, from 0, after which hidden states are tapped."""
    mask_token_id: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer, in tokens; None: full attention."""

    @property
    def tapped_size(self) -> int:
        """Width of a token's tapped hidden states, all taps concatenated."""
        return len(self.target_layer_ids) * self.hidden_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor."""
        d, ff, hd = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * hd, self.num_key_value_heads * hd
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (d, self.tapped_size),
            "hidden_norm.weight": (d,),
            "norm.weight": (d,),
        }
        for layer in range(self.num_hidden_layers):
            shapes |= {
                f"layers.{layer}.{name}.weight": shape
                for name, shape in {
                    "input_layernorm": (d,),
                    "post_attention_layernorm": (d,),
                    "self_attn.q_proj": (q, d),
                    "self_attn.k_proj": (kv, d),
                    "self_attn.v_proj": (kv, d),
                    "self_attn.o_proj": (d, q),
                    "self_attn.q_norm": (hd,),
                    "self_attn.k_norm": (hd,),
                    "mlp.gate_proj": (ff, d),
                    "mlp.up_proj": (ff, d),
                    "mlp.down_proj": (d, ff),
                }.items()
            }
        return shapes


@dataclass
class _DFlashConfig:
    target_layer_ids: Annotated[list[Count], _NotEmpty]
    mask_token_id: Count


@dataclass
class _ConfigFile:
    """The fields of config.json that decide what the network computes."""

    architectures: Annotated[list[Literal["DFlashDraftModel"]], _NotEmpty]
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    vocab_size: Positive
    block_size: Annotated[int, Limit(ge=2)]
    num_target_layers: Positive
    dflash_config: _DFlashConfig
    head_dim: HeadDim | None = None
    rms_norm_eps: Annotated[float, Limit(ge=0)] = 1e-6
    rope_theta: PositiveFloat = 10_000.0
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    partial_rotary_factor: One = 1.0
    attention_bias: Literal[False] | None = None
    hidden_act: Literal["silu"] = "silu"
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    sliding_window: int | None = None


def read_config(folder: Path) -> Config:
    """Read and validate `config.json`.

    Raises ModelError if it is no DFlash checkpoint, or of an unsupported form; the message names
    every fault.
    """
    path = folder / CONFIG
    file = validated(_ConfigFile, read_json(path), str(path), error=ModelError)
    if faults := _contradictions(file):
        raise ModelError(listed(str(path), faults))
    kinds = file.layer_types or ["full_attention"] * file.num_hidden_layers
    rope_theta = file.rope_parameters and file.rope_parameters.rope_theta
    values: dict[str, Any] = {
        each.name: getattr(file, each.name, None) for each in fields(Config)
    } | {
        "head_dim": file.head_dim or file.hidden_size // file.num_attention_heads,
        "rope_theta": rope_theta or file.rope_theta,
        "target_layer_ids": tuple(file.dflash_config.target_layer_ids),
        "mask_token_id": file.dflash_config.mask_token_id,
        "windows": tuple(
            file.sliding_window if kind == "sliding_attention" else None for kind in kinds
        ),
    }
    return Config(**values)


def _contradictions(file: _ConfigFile) -> list[str]:
    """Values that are valid alone and contradict each other."""
    faults = []
    heads, kinds = file.num_attention_heads, file.layer_types
    last_tap, mask = max(file.dflash_config.target_layer_ids), file.dflash_config.mask_token_id
    if not file.head_dim and file.hidden_size % (2 * heads):
        faults.append(f"hidden_size {file.hidden_size} over {heads} heads is no even head size")
    if heads % file.num_key_value_heads:
        faults.append("num_attention_heads is no multiple of num_key_value_heads")
    if last_tap >= file.num_target_layers:
        faults.append(f"layer {last_tap} is tapped, the target has {file.num_target_layers}")
    if mask >= file.vocab_size:
        faults.append(f"mask_token_id is {mask}, the vocabulary has {file.vocab_size} tokens")
    if kinds is not None:
        if len(kinds) != file.num_hidden_layers:
            faults.append(f"layer_types has {len(kinds)} entries, not {file.num_hidden_layers}")
        if "sliding_attention" in kinds and not (file.sliding_window or 0) > 0:
            faults.append(f"sliding_window is {file.sliding_window} for sliding_attention")
    return faults


def read_weights(folder: Path, config: Config) -> dict[str, Array]:
    """Read all tensors as float32, by name. Raises as `read_tensors` does."""
    return {name: tensor.floats() for name, tensor in read_tensors(folder, config).items()}


def read_tensors(folder: Path, config: Config) -> dict[str, StoredTensor]:
    """Find all tensors, by name without the prefix `model.`.

    Raises ModelError if a file cannot be read, or tensors are missing or of another shape or dtype;
    the message names them.
    """
    stored = stored_tensors(folder)
    found = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    check_tensors(folder, config.shapes(), found)
    return found


def read_draft_vocab(folder: Path, config: Config) -> npt.NDArray[np.int64] | None:
    """The tokens that the drafter may draft, [n] ascending; None: the whole vocabulary.

    Raises ModelError if the file is no ascending list of tokens.
    """
    path = folder / DRAFT_VOCAB
    if not path.exists():
        return None
    try:
        tokens: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    is_list = tokens.ndim == 1 and tokens.size and tokens.dtype.kind in "iu"
    if not (
        is_list
        and np.all(np.diff(tokens.astype(np.int64)) > 0)
        and 0 <= int(tokens[0]) <= int(tokens[-1]) < config.vocab_size
    ):
        raise ModelError(
            f"{path} is no ascending list of tokens below {config.vocab_size}; remove it to draft "
            "from the whole vocabulary"
        )
    return np.asarray(tokens, np.int64)
