"""Models of a few random layers in the shapes of published ones, and the GGUF files of them.

The shapes are in tests/data/published_shapes.json, under the names of known.json. Weights come from
one pool of random numbers, so that no checkpoint is written and memory is that of a piece of a
tensor. They are whole multiples of a power of two, the largest of each 32 being 127 of them: Q8_0
holds them exactly, and a file and transformers have the same model.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from gguf import GGMLQuantizationType as Type

from paceline.models.checkpoints.convert import Plan, write
from paceline.models.checkpoints.families import family_of
from paceline.models.checkpoints.layout import layout
from paceline.models.checkpoints.metadata import metadata, rope_factors
from paceline.models.checkpoints.model import Config, read_sizes
from paceline.models.checkpoints.tensors import Form, Output
from support.scripts import script
from support.tiny import tokenizer_fields
from support.tiny_checkpoints import small_values

DATA = Path(__file__).parent.parent / "data" / "published_shapes.json"
SHAPES: dict[str, Any] = json.loads(DATA.read_text("utf-8"))["models"]
"""Name -> source, layers of a test's file, and config.json."""

GROUP = 32
"""Weights of Q8_0 with one scale."""
_POOL = 1 << 24
_DEVIATION = 73.3
"""Of whole numbers from -127 to 127, all as frequent."""
_STRIDE = 7919
"""Groups from a row's first in the pool to the next row's; a prime, so that no two are alike."""
_TYPES = {
    "Q8_0": {Form.MATRIX: Type.Q8_0, Form.TABLE: Type.Q8_0},
    "Q4_K_M": {Form.MATRIX: Type.Q4_K, Form.TABLE: Type.Q6_K},
}
"""Weights of a file -> type of matrices, and of the embeddings, the head, and what is like them."""


@cache
def _pool() -> np.ndarray:
    """[numbers] int8. The stream of RandomState is the same in every version of numpy."""
    numbers = np.frombuffer(np.random.RandomState(0).bytes(_POOL), np.int8).copy()
    numbers[numbers == -128] = 127
    numbers[::GROUP] = 127
    return numbers


class Weights:
    """The tensors of a checkpoint that is nowhere, by their names in it; see `Shards`."""

    def __init__(self, norm_shift: float) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._norm_shift = norm_shift

    def floats(self, name: str, index: Any = slice(None)) -> np.ndarray:
        """`tensor[index]` as float32."""
        shape = self.shapes[name]
        if len(shape) == 1 or shape[-1] % GROUP:
            rng = np.random.default_rng(crc32(name.encode()))
            return small_values(rng, name, shape, self._norm_shift).astype(np.float32)[index]
        exponent = np.round(np.log2(1.5 * shape[-1] ** -0.5 / _DEVIATION))
        return self._rows(name, index).astype(np.float32) * np.float32(2.0**exponent)

    def blocks(self, name: str, index: Any = slice(None)) -> np.ndarray:
        """`tensor[index]` of MXFP4's values or scales, uint8."""
        if name.endswith("_scales"):  # exponents of two, about 1/64
            rows = np.random.default_rng(crc32(name.encode())).integers(
                119, 121, self.shapes[name], np.uint8
            )
            return rows[index]
        return self._rows(name, index).view(np.uint8)

    def _rows(self, name: str, index: Any) -> np.ndarray:
        """Of the pool, as int8: rows that begin at groups."""
        shape = self.shapes[name]
        pool = _pool()
        width = shape[-1]
        rows = np.arange(int(np.prod(shape[:-1]))).reshape(shape[:-1])[index]
        first = (crc32(name.encode()) + rows * _STRIDE) % ((len(pool) - width) // GROUP) * GROUP
        return np.lib.stride_tricks.sliding_window_view(pool, width)[first]


@dataclass(frozen=True)
class Shaped:
    """A model of random layers in a published shape."""

    config: dict[str, Any]
    """With the layers of the file."""
    plan: Plan
    weights: Weights


def shaped(name: str, folder: Path, vocab: int | None = None) -> Shaped:
    """The model of `name`, a key of `SHAPES`; its config.json goes into `folder`.

    `vocab`: the size of its vocabulary at most; None: the published one.
    """
    published = SHAPES[name]["config"]
    count, layers = published["num_hidden_layers"], SHAPES[name]["layers"]
    return model_of(
        {
            **{
                key: value[:layers] if isinstance(value, list) and len(value) == count else value
                for key, value in published.items()
            },
            "num_hidden_layers": layers,
            "vocab_size": min(published["vocab_size"], vocab or published["vocab_size"]),
        },
        folder,
    )


def model_of(values: dict[str, Any], folder: Path) -> Shaped:
    """The model of a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    config = Config(folder / "config.json")
    family = family_of(config)
    sizes = read_sizes(config, family)
    weights = Weights(family.norm_shift)
    outputs = layout(config, family, sizes, _Names(values))
    for output in outputs:
        weights.shapes.update(output.sources)
    fields = {
        "general.file_type": 7,
        **metadata(config, family, sizes),
        **tokenizer_fields(family.arch, sizes.vocab),
    }
    kinds = [(output, Type.F32) for output in outputs]  # `write_shaped` chooses them
    plan = Plan(family.arch, fields, kinds, rope_factors(config, sizes), weights)  # type: ignore[arg-type]
    return Shaped(values, plan, weights)


class _Names:
    """Names that decide the form of a checkpoint: a head of its own, and experts in MXFP4."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def __contains__(self, name: object) -> bool:
        if name == "lm_head.weight":
            return not self._config["tie_word_embeddings"]
        return str(name).endswith("_blocks") and "quantization_config" in self._config


def write_shaped(model: Shaped, path: Path, weights: str = "Q8_0") -> Path:
    """Write the model's GGUF file; `weights` is a key of `_TYPES`.

    In Q4_K_M the matrices are others: random blocks, as they lie in a file.
    """
    outputs = [_stored(output, weights) for output, _ in model.plan.outputs]
    write(replace(model.plan, outputs=outputs), path, lambda _done: None)
    return path


def _stored(output: Output, weights: str) -> tuple[Output, Type]:
    """The tensor with pieces of blocks, and its type."""
    kind = _TYPES[weights].get(output.form, Type.F32)
    if output.form is Form.MXFP4:
        return output, Type.MXFP4
    if kind in (Type.Q4_K, Type.Q6_K) and output.shape[-1] % 256 == 0:
        rng = np.random.default_rng(crc32(output.name.encode()))
        weights_of = script("random_gguf")._random_weights
        return output._replace(pieces=lambda _: [weights_of(rng, output.shape, kind)]), kind
    if kind is Type.F32:
        return output, kind
    return output._replace(pieces=lambda shards: map(_q8, output.pieces(shards))), Type.Q8_0


def _q8(rows: np.ndarray) -> np.ndarray:
    """[n, in] float32 from the pool as blocks of Q8_0, whose scales are all the same."""
    scale = rows[:1, :1].max() / 127
    blocks = np.empty((len(rows), rows.shape[1] // GROUP, 2 + GROUP), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    numbers = (rows * np.float32(1 / scale)).astype(np.int8)
    blocks[..., 2:] = numbers.view(np.uint8).reshape(len(rows), -1, GROUP)
    return blocks.reshape(len(rows), -1)


def some_tokens(vocab: int, count: int) -> list[int]:
    """`count` tokens in order, the first and the last of the vocabulary among them."""
    ends = [*range(8), *range(vocab - 8, vocab)]
    between = np.random.RandomState(1).choice(vocab - 16, count - len(ends), replace=False) + 8
    return sorted([*ends, *between.tolist()])


def some_text(tokens: Sequence[int], length: int) -> list[int]:
    """A text of `length` of these tokens."""
    return np.random.RandomState(2).choice(tokens, length).tolist()
