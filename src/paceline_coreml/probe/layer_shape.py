"""The shape of a layer to probe, and a one-layer model with random weights.

It is a Llama layer, whose operations all families share.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.models import TOKENIZER, Facts
from paceline.storage.files import megabytes
from paceline.system.machine import memory_bytes
from paceline_coreml.conversion.source import Source
from paceline_coreml.engine.artifact import DECODE_ROWS

EXAMPLE = "d=3072,heads=24,kv=8,dh=128,ff=8192,T=8,S=2048"

_SLOTS = 2048
_TOKENS = 64
_MIN_SIZES = {"d": 1, "heads": 1, "kv": 1, "dh": 2, "ff": 1, "T": 1, "S": 2}
_PER_WEIGHT = 20
"""Bytes per weight at a conversion's memory peak. For a layer of Phi-4-mini's shape, 19 were
measured: torch, the trace, the program and the compressed program each have the weights."""
_PER_SCORE = 16
"""Bytes per row and slot of a head: four float32 arrays in the emulator."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of a decoder layer and its passes. Raises InvalidRequest if they conflict."""

    d: int
    """Hidden size."""
    heads: int
    kv: int
    """Number of key and value heads."""
    dh: int
    """Channels per head."""
    ff: int
    """Channels of the feed-forward network."""
    T: int
    """Rows per forward pass."""
    S: int
    """KV cache slots."""

    def __post_init__(self) -> None:
        if self.heads % self.kv:
            raise InvalidRequest(f"kv is {self.kv}; expected a divisor of the {self.heads} heads")
        if self.dh % 2:
            raise InvalidRequest(f"dh is {self.dh}; expected an even number, for RoPE")
        if self.T > self.S:
            raise InvalidRequest(f"T is {self.T}; expected at most S, {self.S} slots")

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in asdict(self).items())

    @property
    def weights(self) -> int:
        return self.d * (2 * (self.heads + self.kv) * self.dh + 3 * self.ff)


def parse_shape(text: str) -> LayerShape:
    """Parse a shape such as `EXAMPLE`. d and heads are required; others have defaults.

    Raises InvalidRequest for an unknown or repeated key, a value that is not a whole number, or
    conflicting values.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in _MIN_SIZES or key in sizes or not (value.isascii() and value.isdigit()):
            raise InvalidRequest(f"invalid size {part.strip()!r}; expected a shape like {EXAMPLE}")
        sizes[key] = int(value)
        if sizes[key] < _MIN_SIZES[key]:
            raise InvalidRequest(f"{key} is {value}; expected {_MIN_SIZES[key]} or more")
    missing = [key for key in ("d", "heads") if key not in sizes]
    if missing:
        raise InvalidRequest(f"shape without {' and '.join(missing)}; expected {EXAMPLE}")
    d, heads = sizes["d"], sizes["heads"]
    if "dh" not in sizes and d % heads:
        raise InvalidRequest(
            f"d is {d}, which is not divisible by {heads} heads; change d, or set dh"
        )
    defaults = {"kv": heads, "dh": d // heads, "ff": 4 * d, "T": DECODE_ROWS, "S": _SLOTS}
    return LayerShape(**{**defaults, **sizes})


def shape_of(config: Any, *, rows: int, slots: int) -> LayerShape:
    """Return the shape of a model's layers, or of one expert, from transformers' config."""
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


def check_memory(name: str, shape: LayerShape, weights: int, *, others: int = 0) -> None:
    """Raise InvalidRequest if a layer's conversion needs more than the machine's memory.

    `weights` is the number of weights in its matrices, `others` that of other float32 numbers.
    """
    states = shape.S * shape.heads * shape.dh
    scores = shape.heads * shape.T * shape.S
    needed = _PER_WEIGHT * (weights + states) + _PER_SCORE * scores + 4 * others
    if needed > memory_bytes():
        raise InvalidRequest(
            f"{name} needs about {megabytes(needed)} of memory; this machine has "
            f"{megabytes(memory_bytes())}; choose a smaller layer or fewer slots"
        )


def random_model(shape: LayerShape, folder: Path) -> Source:
    """Write a checkpoint with one layer of this shape to `folder`; it is the same every time.

    Matrices roughly preserve the length of rows, as in a trained layer.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.d,
        intermediate_size=shape.ff,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv,
        head_dim=shape.dh,
        max_position_embeddings=shape.S,
        vocab_size=_TOKENS,
        initializer_range=shape.d**-0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    facts = Facts(shape.S, (), None, add_bos=False, bos_token=None, eos_token=None, license=None)
    name = f"a random model with shape {shape}"
    return Source(name, {}, name, folder, folder / TOKENIZER, None, facts)
