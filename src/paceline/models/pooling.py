"""How an embedding model makes a vector of a text, by its GGUF file's metadata.

Names and numbers are llama.cpp's (`llama_pooling_type` in llama.h). A model of another format, or
one whose file names no pooling, makes no embeddings.
"""

from collections.abc import Mapping
from typing import Any

from paceline.models.gguf_tokenizer import token_id
from paceline.models.manifest import Pooling

_POOLINGS: Mapping[object, Pooling] = {1: "mean", 2: "first", 3: "last"}


def pooling_facts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The facts `pooling` and `pooled_end`; empty for a model that makes no embeddings here.

    Attention in both directions is nothing that the openvino engine computes.
    """
    family = fields.get("general.architecture")
    pooling = _POOLINGS.get(fields.get(f"{family}.pooling_type"))
    if pooling is None or fields.get(f"{family}.attention.causal", True) is not True:
        return {}
    ends = fields.get("tokenizer.ggml.add_eos_token") is True
    return {"pooling": pooling, "pooled_end": token_id(fields, "eos") if ends else None}
