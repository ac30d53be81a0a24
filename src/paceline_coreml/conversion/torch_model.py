"""Runs a family's layers in torch, block by block, with the inputs of a shard.

The inputs are from the engine's `CallInputs`; the states are the layers' buffers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.shards import Layers
from paceline_coreml.engine.call import run_package
from paceline_coreml.engine.inputs import CallInputs

Floats = npt.NDArray[np.float32]


class TorchPackage:
    """A module of a shard as a `Package`, which supports one state at a time."""

    def __init__(self, module: nn.Module, output: str) -> None:
        self._module, self._output = module.eval(), output

    def make_state(self) -> None:
        for state in self._module.buffers():
            state.zero_()

    @torch.no_grad()
    def predict(self, data: Mapping[str, Floats], state: Any = None) -> dict[str, Floats]:
        del state
        inputs = [torch.from_numpy(np.ascontiguousarray(value)) for value in data.values()]
        return {self._output: self._module(*inputs).numpy()}


def run_layers(
    family: Family, layers: range, stream: Floats, *, conv_slots: int, rows: int
) -> Floats:
    """Run a text through layers, one in memory at a time, in forward passes of `rows` rows.

    Takes the stream before the first layer, [n, stream_size], and returns it after the last one.
    """
    lags, tables = family.shape.lags, family.rope_tables()
    for index in layers:
        module = Layers(family, index, index + 1, (), stateless=False)
        inputs = CallInputs(rows, *tables, conv_slots=conv_slots if lags else 0, lags=lags)
        package = TorchPackage(module, "out_hidden")
        stream = run_package(package, stream, rows, inputs)["out_hidden"]
    return stream
