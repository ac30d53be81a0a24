"""Runs a family's layers in torch, block by block, with the inputs of a shard.

The inputs are from the engine's `CallInputs`; the states are the layers' buffers.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.layers import LayerInputs
from paceline_coreml.engine.inputs import CallInputs

Floats = npt.NDArray[np.float32]


@torch.no_grad()
def run_layers(
    family: Family, layers: range, stream: Floats, *, conv_slots: int, rows: int
) -> Floats:
    """Run a text through layers, one in memory at a time, in forward passes of `rows` rows.

    Takes the stream before the first layer, [n, stream_size], and returns it after the last one.
    """
    lags, tables = family.shape.lags, family.rope_tables()
    for index in layers:
        layer = family.layer(index).eval()
        inputs = CallInputs(rows, *tables, conv_slots=conv_slots if lags else 0, lags=lags)
        blocks = []
        for start in range(0, len(stream), rows):
            count = min(rows, len(stream) - start)
            block = torch.zeros(1, stream.shape[1], rows, 1)
            block[0, :, :count, 0] = torch.from_numpy(stream[start : start + count].T)
            out = layer(block, torch_inputs(inputs.for_rows(start, count)))
            blocks.append(out[0, :, :count, 0].T.numpy())
        stream = np.concatenate(blocks)
    return stream


def layer_inputs(inputs: dict[str, Tensor]) -> LayerInputs:
    return LayerInputs(
        inputs["rope_cos"],
        inputs["rope_sin"],
        inputs["attn_mask"],
        inputs.get("kv_write_mask", _NO_SLOTS),
        inputs.get("window_write"),
        inputs.get("window_read"),
    )


def torch_inputs(arrays: Mapping[str, Floats]) -> LayerInputs:
    return layer_inputs({name: torch.from_numpy(array) for name, array in arrays.items()})


_NO_SLOTS = torch.zeros(1, 1, 0, 0)
"""A token classifier has no KV cache."""
