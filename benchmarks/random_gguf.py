"""Writes GGUF files of random weights in the shapes of Qwen3: sizes people have, without a hub.

    python benchmarks/random_gguf.py 1.7B Q4_0 random-1.7B-Q4_0.gguf

The time and memory of a call depend on shapes and weights forms, not on values. The types of the
tensors are those that llama.cpp's quantize gives them: the embedding, which is the head as well,
has 6 bits in the 4-bit forms, and Q4_K_M mixes Q4_K and Q6_K. The tokenizer is whole: byte-level
BPE with as many tokens and merges as Qwen3's, made of strings of letters; `--tokenizer` takes
that of another GGUF file, by which a text has as many tokens as it has for people. Tensors are
written one by one, so memory is that of the largest.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    TokenType,
)

Type = GGMLQuantizationType
Bytes = npt.NDArray[np.uint8]

ARCHITECTURE = "qwen3"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, as in its config.json."""

    layers: int
    width: int
    ff: int
    heads: int
    kv_heads: int = 8
    head: int = 128
    vocabulary: int = 151_936
    context: int = 40_960


# https://huggingface.co/Qwen/Qwen3-0.6B, -1.7B, -4B and -8B
SHAPES = {
    "0.6B": Shape(28, 1024, 3072, 16),
    "1.7B": Shape(28, 2048, 6144, 16),
    "4B": Shape(36, 2560, 9728, 32),
    "8B": Shape(36, 4096, 12288, 32),  # its own head, of 0.6 billion weights, is left out
}

FILE_TYPES = {
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
    "BF16": LlamaFileType.MOSTLY_BF16,
}

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPACE = "Ġ"
"""A space, as GPT-2 writes it."""

_SLICE = 1 << 16
"""Blocks of weights that are made at once."""


def main() -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("weights", choices=FILE_TYPES)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokenizer", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shape, weights = SHAPES[options.shape], options.weights
    write_random(options.output, shape, weights, seed=options.seed, tokenizer=options.tokenizer)
    print(f"{options.output}: {options.output.stat().st_size / 1e9:.2f} GB")


def write_random(
    path: Path, shape: Shape, weights: str, *, seed: int = 0, tokenizer: Path | None = None
) -> None:
    """Write a file with weights of the form `weights`, a key of `FILE_TYPES`.

    `tokenizer` is a GGUF file of byte-level BPE that has the tokens of the template.
    """
    writer = GGUFWriter(path, ARCHITECTURE)
    _add_fields(writer, shape, weights)
    if tokenizer is None:
        _add_letters(writer, shape)
    else:
        _add_tokenizer(writer, shape, tokenizer)
    tensors = list(_tensors(shape, weights))
    for name, sizes, kind in tensors:
        stored = _stored_shape(sizes, kind)
        dtype = np.dtype(np.float32 if kind == Type.F32 else np.uint8)
        size = int(np.prod(stored)) * dtype.itemsize
        writer.add_tensor_info(name, stored, dtype, size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for _, sizes, kind in tensors:
        if kind == Type.F32:
            writer.write_tensor_data(np.ones(sizes, np.float32))
        else:
            writer.write_tensor_data(_random_weights(rng, sizes, kind))
    writer.close()


def _add_fields(writer: GGUFWriter, shape: Shape, weights: str) -> None:
    writer.add_name(f"random {ARCHITECTURE} {shape.width} x {shape.layers}")
    writer.add_license("cc0-1.0")
    writer.add_file_type(FILE_TYPES[weights])
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_chat_template(TEMPLATE)
    writer.add_add_bos_token(False)


def _add_tokenizer(writer: GGUFWriter, shape: Shape, path: Path) -> None:
    """The tokenizer of another file, with unused tokens up to the shape's vocabulary."""
    fields = GGUFReader(path).fields
    model, pre, tokens, types, merges, end = (
        fields[f"tokenizer.ggml.{name}"].contents()
        for name in ("model", "pre", "tokens", "token_type", "merges", "eos_token_id")
    )
    unused = range(shape.vocabulary - len(tokens))
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *(f"[unused {number}]" for number in unused)])
    writer.add_token_types([*types, *[TokenType.UNUSED] * len(unused)])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(end)


def _add_letters(writer: GGUFWriter, shape: Shape) -> None:
    letters = _byte_letters()
    known = len(SPECIAL) + len(letters)
    words = list(_words(shape.vocabulary - known))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*SPECIAL, *letters, *words])
    ordinary = len(letters) + len(words)
    writer.add_token_types([*[TokenType.CONTROL] * len(SPECIAL), *[TokenType.NORMAL] * ordinary])
    writer.add_token_merges([f"{word[:-1]} {word[-1]}" for word in words])
    writer.add_eos_token_id(SPECIAL.index("<|im_end|>"))
    writer.add_pad_token_id(SPECIAL.index("<|endoftext|>"))


def _byte_letters() -> list[str]:
    """The printable letter of each byte, as GPT-2 has them."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _words(count: int) -> Iterator[str]:
    """Strings of letters, each one letter longer than a string before it, or than a byte's letter.

    All of up to three letters, also after a space; then strings of four, evenly spread.
    """
    short = [
        space + "".join(letters)
        for size in (1, 2, 3)
        for letters in product(ascii_lowercase, repeat=size)
        for space in ("", _SPACE)
        if space or size > 1
    ]
    yield from short[:count]
    further, every = count - len(short), len(ascii_lowercase) ** 4
    if further > 0:
        chosen = {place * every // further for place in range(further)}
        fours = enumerate(product(ascii_lowercase, repeat=4))
        yield from islice(("".join(four) for at, four in fours if at in chosen), further)


def _tensors(shape: Shape, weights: str) -> Iterator[tuple[str, tuple[int, ...], Type]]:
    """Name, shape ([out, in] or [width]) and type of each tensor."""
    kind = Type.Q4_K if weights == "Q4_K_M" else Type[weights]
    finer = Type.Q6_K if weights.startswith("Q4") else kind
    width, kv = shape.width, shape.kv_heads * shape.head
    yield "token_embd.weight", (shape.vocabulary, width), finer
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        mixed = finer if weights == "Q4_K_M" and _more_bits(layer, shape.layers) else kind
        yield at + "attn_norm.weight", (width,), Type.F32
        yield at + "attn_q.weight", (shape.heads * shape.head, width), kind
        yield at + "attn_k.weight", (kv, width), kind
        yield at + "attn_v.weight", (kv, width), mixed
        yield at + "attn_q_norm.weight", (shape.head,), Type.F32
        yield at + "attn_k_norm.weight", (shape.head,), Type.F32
        yield at + "attn_output.weight", (width, shape.heads * shape.head), kind
        yield at + "ffn_norm.weight", (width,), Type.F32
        yield at + "ffn_gate.weight", (shape.ff, width), kind
        yield at + "ffn_up.weight", (shape.ff, width), kind
        yield at + "ffn_down.weight", (width, shape.ff), mixed
    yield "output_norm.weight", (width,), Type.F32


def _more_bits(layer: int, layers: int) -> bool:
    """Layers whose values and down projection have 6 bits in Q4_K_M (llama.cpp's use_more_bits)."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _stored_shape(sizes: tuple[int, ...], kind: Type) -> tuple[int, ...]:
    """Shape in bytes of a quantized tensor; that of an F32 tensor is its own."""
    if kind == Type.F32:
        return sizes
    block, size = GGML_QUANT_SIZES[kind]
    return (*sizes[:-1], sizes[-1] // block * size)


def _random_weights(rng: np.random.Generator, sizes: tuple[int, ...], kind: Type) -> Bytes:
    """Random weights with a mean near 0 and a deviation of in ** -0.5, as they are stored."""
    stored = np.empty(_stored_shape(sizes, kind), np.uint8)
    blocks = stored.reshape(-1, GGML_QUANT_SIZES[kind][1])
    for at in range(0, len(blocks), _SLICE):
        part = blocks[at : at + _SLICE]
        part[...] = rng.integers(0, 256, part.shape, np.uint8)
        _FILL[kind](rng, part, sizes[-1] ** -0.5)
    return stored


# Layouts of the blocks, here of random bits, as in gguf-py's quants.py. Each function writes the
# scales. Deviations of the stored numbers: 4.61 of 0..15, 18.5 of 0..63, 73.9 of -128..127.


def _fill_q4_0(rng: np.random.Generator, blocks: Bytes, deviation: float) -> None:
    blocks[:, :2] = _halves(rng, len(blocks), deviation / 4.61)


def _fill_q8_0(rng: np.random.Generator, blocks: Bytes, deviation: float) -> None:
    blocks[:, :2] = _halves(rng, len(blocks), deviation / 73.9)


def _fill_q6_k(rng: np.random.Generator, blocks: Bytes, deviation: float) -> None:
    blocks[:, 192:208] = rng.integers(24, 57, (len(blocks), 16))
    blocks[:, 208:] = _halves(rng, len(blocks), deviation / 40 / 18.5)


def _fill_q4_k(rng: np.random.Generator, blocks: Bytes, deviation: float) -> None:
    scales = rng.integers(32, 64, (len(blocks), 8), np.uint8)
    # The least value is at about -7.5 scales, as in quantized weights.
    least = np.clip(scales + rng.integers(-3, 4, scales.shape), 0, 63).astype(np.uint8)
    step = _halves(rng, len(blocks), deviation / 47.5 / 4.61)
    blocks[:, :2] = step
    blocks[:, 2:4] = (step.view(np.float16) * np.float16(7.5)).view(np.uint8)
    blocks[:, 4:8] = scales[:, :4] | scales[:, 4:] >> 4 << 6
    blocks[:, 8:12] = least[:, :4] | least[:, 4:] >> 4 << 6
    blocks[:, 12:16] = scales[:, 4:] & 15 | (least[:, 4:] & 15) << 4


def _fill_bf16(rng: np.random.Generator, blocks: Bytes, deviation: float) -> None:
    numbers = rng.standard_normal((len(blocks), 1), np.float32) * np.float32(deviation)
    blocks[...] = numbers.view(np.uint8)[:, 2:]


def _halves(rng: np.random.Generator, count: int, around: float) -> Bytes:
    """[count, 2] bytes of float16, at most a quarter from `around`."""
    return (rng.uniform(0.75, 1.25, (count, 1)) * around).astype(np.float16).view(np.uint8)


_FILL: dict[Type, Any] = {
    Type.Q4_0: _fill_q4_0,
    Type.Q8_0: _fill_q8_0,
    Type.Q6_K: _fill_q6_k,
    Type.Q4_K: _fill_q4_k,
    Type.BF16: _fill_bf16,
}


if __name__ == "__main__":
    main()
