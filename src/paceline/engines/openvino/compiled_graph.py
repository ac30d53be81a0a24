"""One compiled graph with its bound inputs and outputs.

OpenVINO prepares a graph again for every change in the number of rows: about 5 ms for 30 layers,
half the cost of two rows. So each number of rows that decoding often uses has its own copy.
"""

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

CACHES = ("key_cache.", "value_cache.")
"""Prefixes of the KV cache inputs; all other inputs are written in every call."""


class CompiledGraph:
    """A compiled graph. `run` allocates nothing: each input has one tensor, bound once."""

    sizes: tuple[int, ...] = ()
    """Bucket sizes in rows, ascending; empty: any number of rows."""

    def __init__(self, model: Any, options: Mapping[str, str]) -> None:
        """Compile `model` for the CPU."""
        import openvino as ov

        self.compiled = ov.Core().compile_model(model, "CPU", dict(options))
        self._request = self.compiled.create_infer_request()
        self._inputs = {
            port.any_name: _Input(self._request, port)
            for port in self.compiled.inputs
            if not port.any_name.startswith(CACHES)
        }

    @property
    def caches(self) -> list[Any]:
        """Ports of the KV cache."""
        return [port for port in self.compiled.inputs if port.any_name.startswith(CACHES)]

    def bind(self, name: str, tensor: Any) -> None:
        """Bind `tensor` to an input; the caller keeps it alive."""
        self._request.set_tensor(name, tensor)

    def run(self, values: Mapping[str, list[int] | int]) -> float:
        """Run the graph with the values of all inputs but the caches; returns seconds."""
        for name, value in values.items():
            self._inputs[name].write(value)
        started = perf_counter()
        self._request.infer(share_outputs=True)
        return perf_counter() - started

    def output(self, name: str) -> npt.NDArray[np.float32]:
        """An output of the last run as [rows, width] float32: a view, valid until the next."""
        array: npt.NDArray[np.float32] = self._request.get_tensor(name).data
        return array.reshape(-1, array.shape[-1])


class _Input:
    """One input's tensor, bound once, resized when the number of values changes."""

    def __init__(self, request: Any, port: Any) -> None:
        import openvino as ov

        self._tensor = ov.Tensor(port.element_type, ov.Shape([0] * len(port.partial_shape)))
        self._view = self._tensor.data
        self._size = 0
        request.set_tensor(port, self._tensor)

    def write(self, values: list[int] | int) -> None:
        if isinstance(values, list) and len(values) != self._size:
            self._size = len(values)
            self._tensor.shape = [self._size]
            self._view = self._tensor.data
        self._view[...] = values
