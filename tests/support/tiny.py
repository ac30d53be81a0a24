"""A random model small enough to convert in a second or two, as a real GGUF file.

It knows nothing, but it is whole: attention, rotary positions, a byte-level BPE tokenizer with
control tokens, a chat template. What is tested on it is everything but the quality of the text.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize

Type = GGMLQuantizationType
SIZES = {"d": 64, "ff": 128, "layers": 2, "heads": 4, "kv_heads": 2, "context": 512}
WIDE = {**SIZES, "d": 256, "ff": 256}  # K-quants come in runs of 256
START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MERGES = (
    "t h|th e|i n|e r|a n|r e|o n|e s|o r|i s|a t|e n|i t|a l|a r|n d|Ġ t|Ġ a|Ġt he|Ġ s|Ġ w|Ġ c"
    "|in g|Ġa nd|Ġ o|Ġ b|o u|Ġ p|Ġ f|e d|Ġ m|o m|Ġ in|l l|Ġ d|u s|er s|as s|us er|s t|st an|t ant"
    "|i stant|ass istant|Ċ Ċ|Ġ Ġ|1 2|l e|Ġth is|on e"
)


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte, as GPT-2 has them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    rest = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + place) for place, byte in enumerate(rest)})
    return [letters[byte] for byte in range(256)]


def vocabulary(count: int = 320) -> tuple[list[str], list[int], list[str]]:
    """`count` tokens, their types, and merges whose parts and results are all tokens."""
    tokens = [TEXT_END, START, END, *byte_letters()]
    types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 256
    merges = []
    for merge in _MERGES.split("|"):
        left, right = merge.split(" ")
        if left in tokens and right in tokens and left + right not in tokens:
            merges.append(merge)
            tokens.append(left + right)
            types.append(TokenType.NORMAL)
    tokens += ["<tool>"] + [f"<unused{i}>" for i in range(count - 1 - len(tokens))]
    types += [TokenType.USER_DEFINED] + [TokenType.UNUSED] * (len(tokens) - len(types) - 1)
    return tokens, [int(kind) for kind in types], merges


def write_tiny(
    path: Path,
    architecture: str = "llama",
    weights: Type = Type.F16,
    *,
    sizes: Mapping[str, int] = SIZES,
    seed: int = 0,
    fields: Mapping[str, Any] | None = None,
    exact: bool = False,
    split: int = 0,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a tiny model and return its path; of the first shard, if it is split.

    `fields` replaces metadata (None leaves a field out). `exact` writes the same values as the
    file of type `weights` has, as F32. `split` is the most tensors of a shard; 0: one file.
    `tensors` are written as F32 in place of random ones, or in addition.
    """
    with gguf_writer(
        path, architecture, {**_fields(architecture, sizes), **(fields or {})}, split=split
    ) as writer:
        _add_tensors(writer, architecture, weights, sizes, seed, exact, tensors or {})
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if split else path


@contextmanager
def gguf_writer(
    path: Path, architecture: str, fields: Mapping[str, Any], *, split: int = 0
) -> Iterator[GGUFWriter]:
    """Writes a file of `fields`, but those that are None, and of the tensors that it gets."""
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    add: dict[type, Any] = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
    add |= {float: writer.add_float32}
    for key, value in fields.items():
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(
    writer: GGUFWriter,
    architecture: str,
    weights: Type,
    sizes: Mapping[str, int],
    seed: int,
    exact: bool,
    tensors: Mapping[str, np.ndarray],
) -> None:
    rng = np.random.default_rng(seed)
    for name, shape in _shapes(architecture, sizes).items():
        if name in tensors:
            continue
        if len(shape) == 1:
            around = 1.0 if name.endswith("norm.weight") else 0.0
            writer.add_tensor(name, rng.normal(around, 0.1, shape).astype(np.float32))
            continue
        stored = _stored(rng, shape, weights)
        if exact:
            writer.add_tensor(name, dequantize(stored, weights).astype(np.float32))
        else:
            writer.add_tensor(name, stored, raw_dtype=weights)
    for name, rows in tensors.items():
        writer.add_tensor(name, rows.astype(np.float32))


def _fields(architecture: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    head = _head(sizes)
    about = {
        "context_length": sizes["context"],
        "embedding_length": sizes["d"],
        "block_count": sizes["layers"],
        "feed_forward_length": sizes["ff"],
        "attention.head_count": sizes["heads"],
        "attention.head_count_kv": sizes["kv_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": head,
        "vocab_size": len(vocabulary()[0]),
    }
    return {
        "general.name": "tiny",
        "general.license": "cc0-1.0",
        "general.file_type": 1,
        **{f"{architecture}.{key}": value for key, value in about.items()},
        **tokenizer_fields(architecture),
    }


def tokenizer_fields(architecture: str, count: int = 320) -> dict[str, Any]:
    tokens, types, merges = vocabulary(count)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if architecture.startswith("qwen") else "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _head(sizes: Mapping[str, int]) -> int:
    return sizes.get("head", sizes["d"] // sizes["heads"])


def _shapes(architecture: str, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Tensor name -> [out, in], or [d]."""
    d, ff = sizes["d"], sizes["ff"]
    head = _head(sizes)
    q, kv = head * sizes["heads"], head * sizes["kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(vocabulary()[0]), d)}
    for layer in range(sizes["layers"]):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (d,),
            "attn_q.weight": (q, d),
            "attn_k.weight": (kv, d),
            "attn_v.weight": (kv, d),
            "attn_output.weight": (d, q),
            "ffn_norm.weight": (d,),
            "ffn_gate.weight": (ff, d),
            "ffn_up.weight": (ff, d),
            "ffn_down.weight": (d, ff),
        }
        if architecture == "qwen3":
            block |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (d,)
    if architecture == "llama":  # the others share the embedding's weights
        shapes["output.weight"] = shapes["token_embd.weight"]
    return shapes


def _stored(rng: np.random.Generator, shape: tuple[int, ...], kind: Type) -> np.ndarray:
    values = rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
    if shape[0] == len(vocabulary()[0]):
        # Weak rows are seldom the best: the text is nearly all letters that can be read.
        readable = [token.isascii() and token.isprintable() for token in vocabulary()[0]]
        named = [token.startswith("<") and len(token) > 1 for token in vocabulary()[0]]
        values[~np.array(readable) | np.array(named)] *= 0.1
    return quantize(values, kind)


def reference_hidden(path: Path, tokens: list[int]) -> np.ndarray:
    """Return [tokens, d]: the input of a qwen3's output head, computed in float64."""
    reader = GGUFReader(path)
    weights = {
        tensor.name.removesuffix(".weight"): dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads, size = (
        facts[f"qwen3.attention.{name}"] for name in ("head_count", "head_count_kv", "key_length")
    )
    count = len(tokens)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weights[name]

    angle = np.arange(count)[:, None, None] * 10000.0 ** (-np.arange(0, size, 2) / size)

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : size // 2], x[..., size // 2 :]
        turned = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        return np.concatenate(turned, axis=-1)

    x = weights["token_embd"][tokens].astype(np.float64)
    future = np.triu(np.full((count, count), -np.inf), 1)
    for layer in range(facts["qwen3.block_count"]):
        at = f"blk.{layer}."
        h = norm(x, at + "attn_norm")
        q = norm((h @ weights[at + "attn_q"].T).reshape(count, heads, size), at + "attn_q_norm")
        k = norm((h @ weights[at + "attn_k"].T).reshape(count, kv_heads, size), at + "attn_k_norm")
        v = (h @ weights[at + "attn_v"].T).reshape(count, kv_heads, size)
        k, v = (np.repeat(item, heads // kv_heads, axis=1) for item in (rotate(k), v))
        scores = np.einsum("qhd,khd->hqk", rotate(q), k) / np.sqrt(size) + future
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", chances, v).reshape(count, -1)
        x = x + mixed @ weights[at + "attn_output"].T
        h = norm(x, at + "ffn_norm")
        gate = h @ weights[at + "ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ weights[at + "ffn_up"].T)) @ (
            weights[at + "ffn_down"].T
        )
    return norm(x, "output_norm")
