"""The graph of LFM2, LFM2.5 and LFM2-MoE: gated short convolutions, attention in some layers.

As in transformers' modeling_lfm2_moe.py, of the tensors and keys of llama.cpp's GGUF files.
"""

from pathlib import Path

from paceline.engines.openvino.blocks import Blocks, Built, added, product
from paceline.engines.openvino.experts import ExpertProducts
from paceline.engines.openvino.gguf_about import About
from paceline.engines.openvino.paged import Inputs
from paceline.storage.gguf_file import GgufFile

_ROPE_BASE = 1_000_000.0


def lfm2(file: GgufFile, path: Path, inputs: Inputs) -> Built:
    """Build the graph of `file`, at `path`. Raises ModelError for missing keys or tensors."""
    about = About(file, path)
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
    last = blocks.norm(blocks.output_rows(rows), "token_embd_norm", "result_norm")
    logits = blocks.linear(last, "output") if blocks.has("output") else product(last, embeddings)
    return Built(logits, layers)
