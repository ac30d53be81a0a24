"""The shape of a layer to probe, and a model of one such layer with random weights.

It is Llama's layer: the operations that all families share.
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
        for key, value in asdict(self).items():
            if value < _MIN_SIZES[key]:
                raise InvalidRequest(f"{key} is {value}; expected {_MIN_SIZES[key]} or more")
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
        return self.d * (2 * (self.heads + self.kv) * self.dh + 3 * self.ff)


def parse_shape(text: str) -> LayerShape:
    """`EXAMPLE` as a shape. d and heads are required; others have defaults.

    Raises InvalidRequest for an unknown or repeated key, a value that is not a whole number, or
    values that contradict each other.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in _MIN_SIZES or key in sizes or not (value.isascii() and value.isdigit()):
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


def random_model(shape: LayerShape, folder: Path) -> Source:
    """A checkpoint of one layer of this shape, written to `folder`; equal each time.

    Rows about keep their length in a matrix, as in a trained layer.
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
    name = f"a random model of the shape {shape}"
    return Source(name, {}, name, folder, folder / TOKENIZER, None, facts)
