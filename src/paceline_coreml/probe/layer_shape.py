"""The shape of a layer to probe, and a layer of that shape with random weights.

It is Llama's layer: the operations that all families share.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InvalidRequest
from paceline.storage.files import megabytes
from paceline.storage.system import memory_bytes
from paceline_coreml.conversion.families.llama import llama
from paceline_coreml.conversion.family import Family
from paceline_coreml.engine.artifact import DECODE_ROWS

EXAMPLE = "d=3072,heads=24,kv=8,dh=128,ff=8192,T=8,S=2048"

_SLOTS = 2048
_KEYS = ("d", "heads", "kv", "dh", "ff", "T", "S")
_PER_WEIGHT = 20
"""Bytes of memory at the peak of a conversion: 18 were measured for a layer of Phi-4-mini's shape,
whose weights are there as torch's, the trace's, the program's and the compressed ones."""
_PER_SCORE = 16
"""Bytes per row and slot of a head: four arrays of float32 in the rehearsal."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a decoder layer and of its calls. Raises InvalidRequest if they contradict."""

    d: int
    """Hidden size."""
    heads: int
    kv: int
    """Heads of keys and values."""
    dh: int
    """Channels of a head."""
    ff: int
    """Channels of the feed-forward network."""
    T: int
    """Rows of a call."""
    S: int
    """KV cache positions."""

    def __post_init__(self) -> None:
        least = {**dict.fromkeys(_KEYS, 1), "dh": 2, "S": 2}
        for key, value in asdict(self).items():
            if value < least[key]:
                raise InvalidRequest(f"{key} is {value}; expected {least[key]} or more")
        if self.heads % self.kv:
            raise InvalidRequest(f"kv is {self.kv}; expected a divisor of the {self.heads} heads")
        if self.dh % 2:
            raise InvalidRequest(f"dh is {self.dh}; expected an even number, because of RoPE")
        if self.T > self.S:
            raise InvalidRequest(f"T is {self.T}; expected at most the {self.S} slots of S")

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in asdict(self).items())

    @property
    def weights(self) -> int:
        """Numbers in its matrices."""
        return sum(math.prod(shape) for shape in _tensors(self).values())


def parse_shape(text: str) -> LayerShape:
    """`EXAMPLE` as a shape. d and heads are required; others have defaults.

    Raises InvalidRequest for an unknown or repeated key, a value that is not a whole number, or
    values that contradict each other.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in _KEYS or key in sizes or not (value.isascii() and value.isdigit()):
            raise InvalidRequest(f"{part.strip()!r} in a shape; expected sizes as in {EXAMPLE}")
        sizes[key] = int(value)
    missing = [key for key in ("d", "heads") if not sizes.get(key)]
    if missing:
        raise InvalidRequest(f"a shape without {' and '.join(missing)}; expected {EXAMPLE}")
    d, heads = sizes["d"], sizes["heads"]
    if "dh" not in sizes and d % heads:
        raise InvalidRequest(
            f"d is {d}, which {heads} heads do not divide; expected another d, or dh as well"
        )
    defaults = {"kv": heads, "dh": d // heads, "ff": 4 * d, "T": DECODE_ROWS, "S": _SLOTS}
    return LayerShape(**{**defaults, **sizes})


def check_memory(name: str, shape: LayerShape, weights: int, *, others: int = 0) -> None:
    """Raise InvalidRequest if a layer's conversion needs more memory than there is.

    Args:
        name: of the layer, for the message.
        shape: of its attention and its calls.
        weights: numbers in its matrices.
        others: further numbers in memory, as float32.
    """
    states = shape.S * shape.heads * shape.dh
    scores = shape.heads * shape.T * shape.S
    needed = _PER_WEIGHT * (weights + states) + _PER_SCORE * scores + 4 * others
    if needed > memory_bytes():
        raise InvalidRequest(
            f"{name} needs about {megabytes(needed)} of memory, and {megabytes(memory_bytes())} "
            "are here; expected a smaller layer or fewer slots"
        )


def random_family(shape: LayerShape) -> Family:
    """A model of one layer of this shape."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=shape.d,
        intermediate_size=shape.ff,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv,
        head_dim=shape.dh,
        max_position_embeddings=shape.S,
        vocab_size=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    return llama(config, _RandomWeights(_tensors(shape)), slots=shape.S, conv_slots=0)


def _tensors(shape: LayerShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape, of a layer's tensors."""
    queries, keys = shape.heads * shape.dh, shape.kv * shape.dh
    matrices = {
        "self_attn.q_proj": (queries, shape.d),
        "self_attn.k_proj": (keys, shape.d),
        "self_attn.v_proj": (keys, shape.d),
        "self_attn.o_proj": (shape.d, queries),
        "mlp.gate_proj": (shape.ff, shape.d),
        "mlp.up_proj": (shape.ff, shape.d),
        "mlp.down_proj": (shape.d, shape.ff),
        "input_layernorm": (shape.d,),
        "post_attention_layernorm": (shape.d,),
    }
    return {f"model.layers.0.{name}.weight": sizes for name, sizes in matrices.items()}


class _RandomWeights(Mapping[str, Tensor]):
    """Random tensors, made when they are read; equal each time.

    Rows keep the length of their input, as those of a trained layer about do.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed([*self._shapes].index(name))
        return torch.randn(shape, generator=generator) * shape[1] ** -0.5

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def shape_of(config: Any, *, rows: int, slots: int) -> LayerShape:
    """The shape of a model's layers, from a config of transformers: that of one expert of many."""
    heads = config.num_attention_heads
    return LayerShape(
        d=config.hidden_size,
        heads=heads,
        kv=config.num_key_value_heads,
        dh=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ff=getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
        T=rows,
        S=slots,
    )
