"""One compiled copy of a graph with its inputs and outputs.

OpenVINO prepares a graph again whenever a call has another number of rows than the one before:
some 5 ms for 30 layers, half of what two rows cost. A copy that always gets the same number has
nothing to prepare, so there is one for each number of rows that decoding uses often.
"""

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

CACHES = ("key_cache.", "value_cache.")
"""Inputs that are keys and values; the others are written in every call."""


class CompiledGraph:
    """A compiled copy. Nothing is made in `run`: one tensor per input, bound once."""

    sizes: tuple[int, ...] = ()
    """The numbers of rows that it is for, least first; none: for any."""

    def __init__(self, model: Any, options: Mapping[str, str]) -> None:
        """Compile `model`."""
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
        """The ports of keys and values."""
        return [port for port in self.compiled.inputs if port.any_name.startswith(CACHES)]

    def bind(self, name: str, tensor: Any) -> None:
        """Use `tensor` as an input; it must stay alive."""
        self._request.set_tensor(name, tensor)

    def run(self, values: Mapping[str, list[int] | int]) -> float:
        """Run the graph on the values of all inputs but the caches; returns the seconds it took."""
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
    """One input's tensor, bound once; resized only when its shape changes."""

    def __init__(self, request: Any, port: Any) -> None:
        import openvino as ov

        self._tensor = ov.Tensor(port.element_type, ov.Shape([0] * len(port.partial_shape)))
        self._view = self._tensor.data
        self._size = 0
        request.set_tensor(port, self._tensor)

    def write(self, values: list[int] | int) -> None:
        """Copy the numbers in."""
        if isinstance(values, list) and len(values) != self._size:
            self._size = len(values)
            self._tensor.shape = [self._size]
            self._view = self._tensor.data
        self._view[...] = values
