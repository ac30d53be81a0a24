"""The graph of LFM2, LFM2.5 and LFM2-MoE: gated short convolutions, attention in some layers.

As in transformers' modeling_lfm2_moe.py, of the tensors and keys of llama.cpp's GGUF files.
"""

from pathlib import Path

from paceline.engines.openvino.blocks import Blocks, Built, added, product
from paceline.engines.openvino.experts import ExpertProducts
from paceline.engines.openvino.paged import Inputs
from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile, NumberArray

_HEAD = "output"
_ROPE_BASE = 1_000_000.0
_MOST = 1 << 31


def lfm2(file: GgufFile, path: Path, inputs: Inputs) -> Built:
    """Build the graph of `file`, at `path`. Raises ModelError for missing keys or tensors."""
    about = _About(file, path)
    layer_count = about.count("block_count", most=len(file.tensors))
    kv_heads = about.by_layer("attention.head_count_kv", layer_count)
    heads = about.count("attention.head_count")
    blocks = Blocks(
        *(file, path, inputs),
        epsilon=about.number("attention.layer_norm_rms_epsilon"),
        rope_base=about.number("rope.freq_base", _ROPE_BASE),
    )
    rows, embeddings = blocks.embed("token_embd")
    layers = {}
    dense = len(kv_heads)
    if about.arch == "lfm2moe":
        dense = about.count("leading_dense_block_count", 0, least=0)
    products = ExpertProducts(max(len(kv_heads) - dense, 0))
    for layer, count in enumerate(kv_heads):
        prefix = f"blk.{layer}."
        normed = blocks.norm(rows, f"{prefix}attn_norm")
        mixed = (
            blocks.attend(normed, layer, heads, count)
            if count
            else blocks.gated_convolution(normed, layer)
        )
        rows = added(rows, mixed)
        normed = blocks.norm(rows, f"{prefix}ffn_norm")
        fed = (
            blocks.feed_forward(normed, layer)
            if layer < dense
            else blocks.mixture(normed, layer, about.count("expert_used_count"), products)
        )
        rows = layers[layer] = added(rows, fed, f"{prefix}l_out")
    last = blocks.norm(blocks.wanted(rows), "token_embd_norm", "result_norm")
    has_head = any(tensor.name == f"{_HEAD}.weight" for tensor in file.tensors)
    logits = blocks.linear(last, _HEAD) if has_head else product(last, embeddings)
    return Built(logits, layers)


class _About:
    """What the file says of the model."""

    def __init__(self, file: GgufFile, path: Path) -> None:
        self._fields, self._path = file.fields, path
        self.arch = file.fields["general.architecture"]

    def number(self, name: str, default: float | None = None) -> float:
        """The value of `name`, a positive number."""
        value = self._fields.get(f"{self.arch}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
            raise self._wrong(name, value, "a positive number")
        return value

    def count(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST
    ) -> int:
        """The value of `name`, an integer from `least` to `most`."""
        value = self._fields.get(f"{self.arch}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(name, value, f"an integer from {least} to {most}")
        return value

    def by_layer(self, name: str, layers: int) -> list[int]:
        """A whole number for each layer; a single one is for all."""
        value = self._fields.get(f"{self.arch}.{name}")
        if isinstance(value, NumberArray) and len(value.values) == layers:
            return [self._heads(name, int(each)) for each in value.values]
        if isinstance(value, int) and 0 < value < _MOST:
            return [value] * layers
        raise self._wrong(name, value, f"{layers} numbers, one a layer")

    def _heads(self, name: str, value: int) -> int:
        if not 0 <= value < _MOST:
            raise self._wrong(name, value, f"numbers from 0 to {_MOST}")
        return value

    def _wrong(self, name: str, value: object, expected: str) -> ModelError:
        value = value.values.tolist() if isinstance(value, NumberArray) else value
        shown = "is missing" if value is None else f"is {str(value)[:80]}"
        return ModelError(f"{self._path}: {self.arch}.{name} {shown}; expected {expected}")
