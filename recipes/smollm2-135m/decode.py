"""Decodes many sequences of a Llama at once, a token of each in a step, on a GPU.

Products of matrices are torch's; what is between them is in four Triton kernels, so that a step has
few launches, and one CUDA graph can hold them all. Weights, keys and values are float16, sums
float32. It does not know what the tokens mean. Invariant: a sequence reads only its slots up to its
own position, so the next conversation overwrites the last one, and nothing is cleared.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile, read_gguf


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shape of a model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    """Width of a feed-forward layer's inner values."""
    vocab: int
    eps: float
    """Of the norms."""
    rope_base: float

    @property
    def head(self) -> int:
        """Values of a head."""
        return self.width // self.heads


class Layer(NamedTuple):
    """Weights of a layer: norms float32, matrices [out, in] float16."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    inner_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Weights(NamedTuple):
    """A model."""

    sizes: Sizes
    embedding: Tensor
    """[vocab, width] float16"""
    layers: list[Layer]
    norm: Tensor
    output: Tensor
    """[vocab, width] float16: logits are its product with the state after the last norm."""


_PARTS = (
    ("attn_norm",),
    ("attn_q", "attn_k", "attn_v"),
    ("attn_output",),
    ("ffn_norm",),
    ("ffn_gate", "ffn_up"),
    ("ffn_down",),
)
"""Tensors of a layer in a file that are joined to those of `Layer`."""


def read_weights(path: Path, device: str) -> Weights:
    """Read a GGUF file. Raises ModelError if it is no Llama, or one with unknown parts."""
    file = read_gguf(path)
    sizes = _sizes(path, file)
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in file.tensors}
    names = [
        [f"blk.{layer}.{name}" for name in part] for layer in range(sizes.layers) for part in _PARTS
    ]
    known = {"token_embd", "output_norm", *(name for part in names for name in part)}
    if tensors.keys() - {"output"} != known:
        odd = min((tensors.keys() - {"output"}) ^ known)
        raise ModelError(f"{path} differs from a plain Llama in the tensor {odd}")

    def read(*names: str) -> Tensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        parts = [
            torch.tensor(dequantize(tensor.data, GGMLQuantizationType(tensor.kind)))
            for tensor in map(tensors.__getitem__, names)
        ]
        whole = torch.cat(parts)
        return whole.to(device, torch.float32 if whole.dim() == 1 else torch.float16)

    joined = [read(*part) for part in names]
    count = len(_PARTS)
    embedding = read("token_embd")
    return Weights(
        sizes,
        embedding,
        [Layer(*joined[layer * count : (layer + 1) * count]) for layer in range(sizes.layers)],
        read("output_norm"),
        read("output") if "output" in tensors else embedding,
    )


def _sizes(path: Path, file: GgufFile) -> Sizes:
    fields = file.fields
    if (family := fields.get("general.architecture")) != "llama":
        raise ModelError(f"{path} is of the family {family}; this recipe decodes llama")
    try:
        sizes = Sizes(
            width=fields["llama.embedding_length"],
            layers=fields["llama.block_count"],
            heads=fields["llama.attention.head_count"],
            kv_heads=fields["llama.attention.head_count_kv"],
            inner=fields["llama.feed_forward_length"],
            vocab=len(fields["tokenizer.ggml.tokens"]),
            eps=fields["llama.attention.layer_norm_rms_epsilon"],
            rope_base=fields["llama.rope.freq_base"],
        )
    except KeyError as error:
        raise ModelError(f"{path} has no field {error}") from error
    if sizes.head < 16 or sizes.head & (sizes.head - 1) or sizes.heads > 16 * sizes.kv_heads:
        raise ModelError(
            f"{path} has heads of {sizes.head} values, {sizes.heads} for {sizes.kv_heads} of keys; "
            "expected a power of 2 from 16 on, and at most 16 for each of keys"
        )
    return sizes


class Decoder:
    """A batch of sequences with their keys and values."""

    def __init__(self, weights: Weights, batch: int, slots: int) -> None:
        """Allocate `slots` positions for each of `batch` sequences."""
        sizes, device = weights.sizes, weights.embedding.device
        self._weights, self._batch, self._slots = weights, batch, slots
        # In float64: at a late position a float32 angle is wrong in its third digit.
        turns = torch.arange(0, sizes.head, 2, dtype=torch.float64) / sizes.head
        angles = torch.arange(slots, dtype=torch.float64)[:, None] / sizes.rope_base**turns
        self._cos, self._sin = (part.float().to(device) for part in (angles.cos(), angles.sin()))

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float16, device=device)

        cache = sizes.layers, batch, sizes.kv_heads, slots, sizes.head
        self._keys, self._values = empty(*cache), empty(*cache)
        self._normed, self._queries = empty(batch, sizes.width), empty(batch, sizes.width)
        self._mixed, self._inner = empty(batch, sizes.width), empty(batch, sizes.inner)

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits after reading a token of each sequence, [batch, vocab] float16.

        Args:
            tokens: [batch] int64
            positions: [batch] int32, less than `slots`; all earlier ones were read.
        """
        weights = self._weights
        stream = torch.zeros_like(self._normed, dtype=torch.float32)
        change = weights.embedding[tokens]
        for number, layer in enumerate(weights.layers):
            normed = self._add_and_norm(stream, change, layer.attention_norm)
            change = self._attention(number, normed @ layer.qkv.T, positions) @ layer.output.T
            normed = self._add_and_norm(stream, change, layer.inner_norm)
            change = self._gated(normed @ layer.gate_up.T) @ layer.down.T
        return self._add_and_norm(stream, change, weights.norm) @ weights.output.T

    def _add_and_norm(self, stream: Tensor, change: Tensor, weight: Tensor) -> Tensor:
        width = self._weights.sizes.width
        _add_and_norm[(self._batch,)](
            *(stream, change, weight, self._normed, self._weights.sizes.eps),
            width=width,
            block=triton.next_power_of_2(width),
        )
        return self._normed

    def _attention(self, layer: int, qkv: Tensor, positions: Tensor) -> Tensor:
        sizes, keys, values = self._weights.sizes, self._keys[layer], self._values[layer]
        shape: dict[str, Any] = {"heads": sizes.heads, "kv_heads": sizes.kv_heads}
        _rotate_and_store[(self._batch, sizes.heads + 2 * sizes.kv_heads)](
            *(qkv, self._cos, self._sin, positions, self._queries, keys, values, self._slots),
            **shape,
            half=sizes.head // 2,
        )
        _attend[(self._batch * sizes.kv_heads,)](
            *(self._queries, keys, values, positions, self._mixed, sizes.head**-0.5, self._slots),
            **shape,
            width=sizes.head,
            block=64,
        )
        return self._mixed

    def _gated(self, gate_up: Tensor) -> Tensor:
        width = self._weights.sizes.inner
        _gate[(self._batch,)](
            gate_up, self._inner, width=width, block=triton.next_power_of_2(width)
        )
        return self._inner


# A program of each kernel has one sequence, and in attention one head of keys.


@triton.jit
def _add_and_norm(  # noqa: PLR0917
    stream, change, weight, normed, eps, width: tl.constexpr, block: tl.constexpr
):
    """Add `change` to `stream` [batch, width] float32; `normed` becomes its RMS norm."""
    column = tl.arange(0, block)
    at = tl.program_id(0).to(tl.int64) * width + column
    mask = column < width
    x = tl.load(stream + at, mask=mask, other=0.0)
    x += tl.load(change + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(stream + at, x, mask=mask)
    root = 1.0 / tl.sqrt(tl.sum(x * x) / width + eps)
    scaled = x * root * tl.load(weight + column, mask=mask, other=0.0)
    tl.store(normed + at, scaled.to(tl.float16), mask=mask)


@triton.jit
def _rotate_and_store(  # noqa: PLR0917
    qkv,
    cos,
    sin,
    positions,
    queries,
    keys,
    values,
    slots,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
):
    """Take one head of a row of `qkv` to its place; queries and keys are rotated first.

    In a GGUF file of a Llama, the two values of a pair are side by side.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, half)
    position = tl.load(positions + sequence)
    source = qkv + (sequence * (heads + 2 * kv_heads) + head) * 2 * half + 2 * pair
    x = tl.load(source).to(tl.float32)
    y = tl.load(source + 1).to(tl.float32)
    # Values are turned by nothing.
    is_turned = head < heads + kv_heads
    c = tl.where(is_turned, tl.load(cos + position * half + pair), 1.0)
    s = tl.where(is_turned, tl.load(sin + position * half + pair), 0.0)
    if head < heads:
        target = queries + (sequence * heads + head) * 2 * half
    elif head < heads + kv_heads:
        row = sequence * kv_heads + head - heads
        target = keys + (row * slots + position) * 2 * half
    else:
        row = sequence * kv_heads + head - heads - kv_heads
        target = values + (row * slots + position) * 2 * half
    tl.store(target + 2 * pair, (x * c - y * s).to(tl.float16))
    tl.store(target + 2 * pair + 1, (x * s + y * c).to(tl.float16))


@triton.jit
def _attend(  # noqa: PLR0917
    queries,
    keys,
    values,
    positions,
    mixed,
    scale,
    slots,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Attention of the query heads that share a head of keys, with softmax block by block.

    `tl.dot` takes at least 16 rows: those after the shared heads are zeros, and are not stored.
    """
    sequence = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(0) % kv_heads
    shared: tl.constexpr = heads // kv_heads
    count = tl.load(positions + sequence) + 1
    row = tl.arange(0, 16)
    column = tl.arange(0, width)
    at = (sequence * heads + kv_head * shared + row[:, None]) * width + column[None, :]
    is_head = row[:, None] < shared
    query = tl.load(queries + at, mask=is_head, other=0.0)
    begin = (sequence * kv_heads + kv_head) * slots
    highest = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    sums = tl.zeros([16, width], tl.float32)
    for first in range(0, count, block):
        slot = first + tl.arange(0, block)
        is_read = slot < count
        place = (begin + slot[:, None]) * width + column[None, :]
        key = tl.load(keys + place, mask=is_read[:, None], other=0.0)
        value = tl.load(values + place, mask=is_read[:, None], other=0.0)
        scores = tl.where(is_read[None, :], tl.dot(query, tl.trans(key)) * scale, -1e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        kept = tl.exp(highest - higher)
        chances = tl.exp(scores - higher[:, None])
        total = total * kept + tl.sum(chances, 1)
        sums = sums * kept[:, None] + tl.dot(chances.to(tl.float16), value)
        highest = higher
    tl.store(mixed + at, (sums / total[:, None]).to(tl.float16), mask=is_head)


@triton.jit
def _gate(gate_up, gated, width: tl.constexpr, block: tl.constexpr):
    """SwiGLU of rows [gate, up]."""
    column = tl.arange(0, block)
    row = tl.program_id(0).to(tl.int64)
    mask = column < width
    source = gate_up + row * 2 * width + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    gated_row = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(gated + row * width + column, gated_row.to(tl.float16), mask=mask)
