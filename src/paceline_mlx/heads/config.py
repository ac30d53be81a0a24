"""The common part of every head's config.json: its fields, their checks, and the head's shape."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.drafters.heads import HeadFacts
from paceline.errors import ModelError
from paceline.storage.files import read_json
from paceline.storage.validation import Limit, Positive

CONFIG = "config.json"
_T = TypeVar("_T")

PositiveFloat = Annotated[float, Limit(gt=0)]
HeadDim = Annotated[int, Limit(ge=2, multiple_of=2)]
One = Annotated[float, Limit(ge=1, le=1)]


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """RoPE scaling that divides low frequencies by `factor` and keeps high ones.

    A frequency is low if it makes fewer than `low_freq_factor` turns within
    `original_max_position_embeddings` tokens, and high if it makes more than `high_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def periods(self, dims: int, theta: float) -> npt.NDArray[np.float32]:
        """Return the inverses of the frequencies, [dims / 2], in positions per radian.

        Scales like transformers' `_compute_llama3_parameters`: between low and high, it
        interpolates by the number of turns.
        """
        plain = 1 / theta ** (np.arange(0, dims, 2) / dims)
        turns = self.original_max_position_embeddings * plain / (2 * np.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        scaled = plain * (kept + (1 - kept) / self.factor)
        return np.asarray(1 / scaled, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """The target's vocabulary size."""
    rms_norm_eps: float
    rope_theta: float
    taps: tuple[int, ...]
    """Layers of the target, from 0, whose output is tapped."""
    num_target_layers: int | None = None
    """Layers of the target, or None if the checkpoint does not state them."""
    llama3_rope: Llama3Rope | None = None

    def facts(self, kind: str, form: str) -> HeadFacts:
        return HeadFacts(kind, form, self.hidden_size, self.vocab_size, self.num_target_layers)

    @property
    def tapped_size(self) -> int:
        return len(self.taps) * self.hidden_size

    def layer_shapes(
        self, width: int, *, gated: bool = False, head_norms: bool = True
    ) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of a decoder layer's weights, with Hugging Face's names.

        `width`: size of attention's input; `gated`: the same number of gate rows follows each
        head's query rows; `head_norms`: queries and keys are normalized.
        """
        d, ff, hd = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * hd, self.num_key_value_heads * hd
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (2 * q if gated else q, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (d, q),
            "post_attention_layernorm": (d,),
            "mlp.gate_proj": (ff, d),
            "mlp.up_proj": (ff, d),
            "mlp.down_proj": (d, ff),
        }
        if head_norms:
            shapes |= {"self_attn.q_norm": (hd,), "self_attn.k_norm": (hd,)}
        return {f"{name}.weight": shape for name, shape in shapes.items()}


def architecture(folder: Path) -> str | None:
    """Return the architecture in a folder's `config.json`, or None if there is none."""
    try:
        names = read_json(folder / CONFIG).get("architectures")
    except ModelError:
        return None
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def with_fields_of(kind: type[_T], *files: object, **values: Any) -> _T:
    """Create a dataclass from parsed files' fields of the same names, and `values`."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    named = {name: getattr(file, name) for file in files for name in names if hasattr(file, name)}
    return kind(**named | values)


@dataclass(kw_only=True)
class Rope:
    """The `rope_parameters` of transformers 5, or `rope_scaling` of transformers 4."""

    rope_type: Literal["default", "llama3"] | None = None
    type: Literal["default", "llama3"] | None = None
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: One = 1.0
    factor: Annotated[float, Limit(ge=1)] | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: Positive | None = None

    @property
    def llama3(self) -> Llama3Rope | None:
        """The scaling, or None for plain RoPE.

        Raises ValueError, with the reason, if a value is missing or the bounds are reversed.
        """
        if "llama3" not in (self.rope_type, self.type):
            return None
        values = {field.name: getattr(self, field.name) for field in fields(Llama3Rope)}
        if missing := [name for name, value in values.items() if value is None]:
            raise ValueError(f"RoPE type llama3 requires {', '.join(missing)}")
        scaling = Llama3Rope(**values)
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise ValueError(
                f"RoPE's low_freq_factor {scaling.low_freq_factor} is not below its "
                f"high_freq_factor {scaling.high_freq_factor}"
            )
        return scaling


@dataclass(kw_only=True)
class HeadFile:
    """The fields of every head's config.json that affect its computation."""

    hidden_size: Positive
    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    vocab_size: Positive
    head_dim: HeadDim | None = None
    rms_norm_eps: Annotated[float, Limit(ge=0)] = 1e-6
    attention_bias: Literal[False] | None = None
    hidden_act: Literal["silu"] = "silu"


@dataclass(kw_only=True)
class DrafterFile(HeadFile):
    """The config fields of a head with its own checkpoint folder."""

    rope_theta: PositiveFloat = 10_000.0
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None

    @property
    def llama3_rope(self) -> Llama3Rope | None:
        """The scaling in either field. Raises ValueError with the reason if it is invalid."""
        ropes = [rope for rope in (self.rope_parameters, self.rope_scaling) if rope is not None]
        return next((scaling for rope in ropes if (scaling := rope.llama3)), None)

    def settings(self) -> dict[str, Any]:
        """Return the fields of `HeadConfig` that a file may state in two ways."""
        theta = self.rope_parameters and self.rope_parameters.rope_theta
        return {
            "num_key_value_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim or self.hidden_size // self.num_attention_heads,
            "rope_theta": theta or self.rope_theta,
            "llama3_rope": self.llama3_rope,
        }

    def head_faults(self) -> list[str]:
        """Return the contradictions in the numbers of heads and in RoPE."""
        faults, heads = [], self.num_attention_heads
        if not self.head_dim and self.hidden_size % (2 * heads):
            size = f"hidden_size {self.hidden_size} / num_attention_heads {heads}"
            faults.append(f"{size} is not an even head size")
        if heads % (self.num_key_value_heads or heads):
            faults.append("num_attention_heads is not a multiple of num_key_value_heads")
        try:
            _ = self.llama3_rope
        except ValueError as error:
            faults.append(str(error))
        return faults
