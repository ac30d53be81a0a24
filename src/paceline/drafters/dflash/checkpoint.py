"""A DFlash checkpoint on disk: `config.json` and safetensors, as z-lab publishes them.

Everything that is wrong with a checkpoint, or with a pair of drafter and target, is named in one
error before anything is computed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.storage.files import read_json

Array = npt.NDArray[np.float32]

ARCHITECTURE = "DFlashDraftModel"
CONFIG = "config.json"
DRAFT_VOCAB = "draft_vocab.npy"
"""Our addition, which others pass over: the tokens that are drafted at all, where not all are."""


@dataclass(frozen=True, slots=True)
class Config:
    """What a checkpoint's config.json says."""

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
    """Rows of a block: the last token and block_size - 1 drafts."""
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    """Layers of the target (0 is the first) after which hidden states are tapped."""
    mask_token_id: int
    windows: tuple[int | None, ...]
    """For each layer how many positions back it sees; None: all."""

    @property
    def feature_size(self) -> int:
        """Width of the tapped features of a token, all taps side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor."""
        d, ff, hd = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * hd, self.num_key_value_heads * hd
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (d, self.feature_size),
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


_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "block_size",
    "num_target_layers",
)


_KINDS = {"full_attention", "sliding_attention"}


def read_config(folder: Path) -> Config:
    """Read and check `config.json`.

    Raises:
        ModelError: it is no DFlash checkpoint, or of a form that is not known here; the message
            names every fault.
    """
    value = read_json(folder / CONFIG)
    own = value.get("dflash_config")
    own = own if isinstance(own, dict) else {}
    taps, mask = own.get("target_layer_ids"), own.get("mask_token_id")
    faults = _field_faults(value)
    if not (isinstance(taps, list) and taps and all(map(_is_place, taps))):
        faults.append(f"dflash_config.target_layer_ids is {taps}, expected a list of layers")
    if not _is_place(mask):
        faults.append(f"dflash_config.mask_token_id is {mask!r}, expected a token")
    theta, rope_faults = _rope(value)
    faults += rope_faults
    if not faults:
        faults += _disagreements(value, taps or [], mask or 0)
    if faults:
        raise ModelError(f"{folder / CONFIG} cannot be used: {'; '.join(faults)}")
    return _config(value, theta, tuple(taps or ()), mask or 0)


def read_weights(folder: Path, config: Config) -> dict[str, Array]:
    """All tensors of a checkpoint as float32, under their names.

    Raises:
        ModelError: a file cannot be read, or a tensor is missing or of another shape; the message
            names them all.
    """
    import safetensors

    found: dict[str, Array] = {}
    for path in weight_files(folder):
        try:
            tensors = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        for name, tensor in tensors:
            found[name.removeprefix("model.")] = _as_float32(path, name, tensor)
    check_weights(folder, config, found, lambda rows: bool(np.isfinite(rows).all()))
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a checkpoint.

    Raises:
        ModelError: there are none.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} has no .safetensors file; expected a DFlash checkpoint")
    return paths


def check_weights(
    folder: Path, config: Config, found: Mapping[str, Any], finite: Callable[[Any], bool]
) -> None:
    """Refuse tensors, by name, that are not those of the config; `finite` says it of all numbers.

    Raises:
        ModelError: naming every fault.
    """
    faults = []
    for name, shape in config.shapes().items():
        if name not in found:
            faults.append(f"{name} is missing")
        elif found[name].shape != shape:
            faults.append(f"{name} is {list(found[name].shape)}, expected {list(shape)}")
        elif not finite(found[name]):
            faults.append(f"{name} has values that are no numbers")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ModelError(f"the weights in {folder} cannot be used: {'; '.join(faults[:5])}{more}")


def read_draft_vocab(folder: Path, config: Config) -> npt.NDArray[np.int64] | None:
    """The tokens that are drafted at all, ascending; None where all are.

    Raises:
        ModelError: the file is no ascending list of tokens.
    """
    path = folder / DRAFT_VOCAB
    if not path.exists():
        return None
    try:
        tokens: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    numbers = tokens.ndim == 1 and tokens.size and tokens.dtype.kind in "iu"
    if not (
        numbers
        and np.all(np.diff(tokens.astype(np.int64)) > 0)
        and 0 <= int(tokens[0]) <= int(tokens[-1]) < config.vocab_size
    ):
        raise ModelError(
            f"{path} is no ascending list of tokens below {config.vocab_size}; remove it to draft "
            "from the whole vocabulary"
        )
    return np.asarray(tokens, np.int64)


def _config(value: Mapping[str, Any], theta: float, taps: tuple[int, ...], mask: int) -> Config:
    layers = value["num_hidden_layers"]
    kinds = value.get("layer_types") or ["full_attention"] * layers
    window = value.get("sliding_window")
    return Config(
        **{name: value[name] for name in _COUNTS},
        head_dim=value.get("head_dim") or value["hidden_size"] // value["num_attention_heads"],
        rms_norm_eps=float(value.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        target_layer_ids=taps,
        mask_token_id=mask,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
    )


def _field_faults(value: Mapping[str, Any]) -> list[str]:
    """What is wrong with a field on its own."""
    architectures, kinds = value.get("architectures"), value.get("layer_types")
    epsilon, head = value.get("rms_norm_eps", 1e-6), value.get("head_dim")
    faults = []
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        faults.append(f"architectures is {architectures!r}, expected {ARCHITECTURE}")
    faults += [
        f"{name} is {value.get(name)!r}, expected a whole number above 0"
        for name in _COUNTS
        if not _is_count(value.get(name))
    ]
    if head is not None and not (_is_count(head) and head % 2 == 0):
        faults.append(f"head_dim is {head!r}, expected an even whole number above 0")
    if not (_is_number(epsilon) and epsilon >= 0):
        faults.append(f"rms_norm_eps is {epsilon!r}, expected a small number")
    if value.get("attention_bias"):
        faults.append("attention_bias is set, expected none")
    if value.get("hidden_act", "silu") != "silu":
        faults.append(f"hidden_act is {value['hidden_act']!r}, expected 'silu'")
    if kinds is not None and not (isinstance(kinds, list) and set(map(str, kinds)) <= _KINDS):
        faults.append(
            f"layer_types is {kinds!r}, expected a list of {' and '.join(sorted(_KINDS))}"
        )
    return faults


def _rope(value: Mapping[str, Any]) -> tuple[float, list[str]]:
    """theta, and what is not known here: transformers 4 and 5 write it in different places."""
    new, old = value.get("rope_parameters") or {}, value.get("rope_scaling") or {}
    if not (isinstance(new, dict) and isinstance(old, dict)):
        return 1.0, ["rope_parameters or rope_scaling is no object"]
    kind = new.get("rope_type") or old.get("rope_type") or old.get("type") or "default"
    theta = new.get("rope_theta", value.get("rope_theta", 10_000.0))
    faults = [] if kind == "default" else [f"RoPE is of type {kind!r}, expected 'default'"]
    if new.get("partial_rotary_factor", value.get("partial_rotary_factor", 1.0)) != 1:
        faults.append("RoPE turns a part of the head, expected all of it")
    if not _is_number(theta) or not theta > 0:
        faults.append(f"rope_theta is {theta!r}, expected a number above 0")
        theta = 1.0
    return float(theta), faults


def _disagreements(value: Mapping[str, Any], taps: list[int], mask: int) -> list[str]:
    """Numbers that are fine alone and do not go together."""
    faults = []
    heads = value["num_attention_heads"]
    if not value.get("head_dim") and value["hidden_size"] % (2 * heads):
        faults.append(f"hidden_size {value['hidden_size']} gives {heads} heads no even size")
    if heads % value["num_key_value_heads"]:
        faults.append("num_attention_heads is no multiple of num_key_value_heads")
    if value["block_size"] < 2:
        faults.append("block_size is 1, which drafts nothing")
    if max(taps) >= value["num_target_layers"]:
        faults.append(
            f"layer {max(taps)} is tapped of a target with {value['num_target_layers']} layers"
        )
    if not 0 <= mask < value["vocab_size"]:
        faults.append(f"mask_token_id is {mask}, the vocabulary has {value['vocab_size']} tokens")
    kinds = value.get("layer_types")
    if kinds is not None:
        if len(kinds) != value["num_hidden_layers"]:
            faults.append("layer_types has not one entry a layer")
        if "sliding_attention" in kinds and not _is_count(value.get("sliding_window")):
            faults.append("there are sliding layers, and sliding_window is not set")
    return faults


def _as_float32(path: Path, name: str, tensor: Mapping[str, Any]) -> Array:
    kind, data = tensor["dtype"], tensor["data"]
    if kind == "BF16":  # the upper half of a float32
        wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(tensor["shape"])
    known = {"F32": np.float32, "F16": np.float16}
    if kind not in known:
        raise ModelError(f"{path}: {name} is {kind}, expected BF16, F16 or F32")
    return np.frombuffer(data, known[kind]).astype(np.float32).reshape(tensor["shape"])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_place(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
