"""Random tiny GGUF files of each family, with the head counts of published models.

`tests/data/tiny_families.json` has their metadata and shapes, as llama.cpp's converter names them.
Every weight has an effect, and no two rows of logits are alike.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import quantize

from support.tiny import Type, gguf_writer, tokenizer_fields

_DATA = Path(__file__).parents[1] / "data" / "tiny_families.json"


@cache
def forms() -> Mapping[str, Any]:
    """Return form name -> metadata and tensors; a dash introduces special features of the form."""
    return json.loads(_DATA.read_text("utf-8"))


def architecture_of(form: str) -> str:
    return str(forms()[form]["fields"]["general.architecture"])


def write_gguf_of(
    form: str,
    path: Path,
    seed: int = 0,
    *,
    weights: Type = Type.F32,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    vocab_size: int | None = None,
) -> Path:
    """Write a form's file, with the tokenizer of tiny models; return `path`.

    Args:
        form: a key of `forms`.
        path: of the file.
        seed: of the weights.
        weights: type of matrices whose rows are whole groups of it; others are F32.
        fields: replaces metadata; names without a dot before them are the architecture's.
        tensors: written as F32 in place of random ones, or in addition.
        vocab_size: tokens of the vocabulary; None: the form's.
    """
    architecture = architecture_of(form)
    count = vocab_size or forms()[form]["fields"][f"{architecture}.vocab_size"]
    own = forms()[form]["fields"] | {f"{architecture}.vocab_size": count}
    own |= tokenizer_fields(architecture, count) | dict(fields or {})
    rng = np.random.RandomState(seed)  # the same stream in every version of numpy
    replaced = dict(tensors or {})
    own.pop("general.architecture")
    with gguf_writer(path, architecture, own) as writer:
        for name, shape, kind in _tensors(form, count):
            values = replaced.pop(name, None)
            given = values is not None
            rows = np.asarray(values if given else _values(rng, form, name, shape), np.float32)
            stored = Type.F32 if given else _stored_as(name, shape, kind or weights)
            data = rows if stored == Type.F32 else quantize(rows, stored)
            writer.add_tensor(name, data, raw_dtype=stored)
        for name, rows in replaced.items():
            writer.add_tensor(name, np.asarray(rows, np.float32))
    return path


def _tensors(form: str, count: int) -> Iterator[tuple[str, tuple[int, ...], Type | None]]:
    content = forms()[form]
    packed = tuple(content.get("mxfp4", ()))
    groups = [((), content["tensors"]), *content["layers"]]
    for layers, shapes in groups:
        for layer in layers or ("",):
            for name, shape in shapes.items():
                rows = count if name in _OF_TOKENS else shape[0]
                kind = Type.MXFP4 if name in packed else None
                full = f"blk.{layer}.{name}" if layers else name
                yield full, (rows, *shape[1:]), kind


_OF_TOKENS = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
_KEPT = ("conv.weight", "conv1d.weight", "gate_inp.weight")
"""Ends of names of matrices that every file has as F32."""


def _stored_as(name: str, shape: tuple[int, ...], kind: Type) -> Type:
    grouped = len(shape) > 1 and shape[-1] % 32 == 0 and not name.endswith((".bias", *_KEPT))
    return kind if grouped else Type.F32


def _values(rng: np.random.RandomState, form: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    factors = forms()[form].get("values", {}).get(name)
    if factors is not None:
        return np.array(factors)
    last = name.removesuffix(".weight").rpartition(".")[2]
    if last == "layer_output_scale":
        return rng.uniform(0.8, 1.2, shape)
    if last == "ssm_a":  # a state keeps about 0.6 to 0.99 of itself from row to row
        return -np.exp(rng.uniform(-4, -0.5, shape))
    if last.endswith("norm"):
        # Scores of gemma4 are not divided; trained norms keep them small.
        small = prod(shape) ** -0.5 if architecture_of(form) == "gemma4" else 1.0
        return rng.normal(1, 0.1, shape) * (small if last == "attn_q_norm" else 1.0)
    if last in ("bias", "attn_sinks"):
        return rng.normal(0, 0.2, shape)
    return rng.normal(0, 1.5 * shape[-1] ** -0.5, shape)
