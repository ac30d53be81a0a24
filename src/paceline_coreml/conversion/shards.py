"""Converts torch layers to a Core ML package: traced with the maximum rows, static or flexible.

This file defines the inputs and outputs of shards for `paceline_coreml.engine`. It works for any
family, and depends on neither folders nor manifests.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.layers import LayerInputs, projection
from paceline_coreml.engine.packages import state_input, state_output


@dataclass(frozen=True, slots=True)
class ShardSizes:
    rows: int
    """Maximum T."""
    slots: int
    """KV cache slots: the context length."""
    conv_slots: int
    """Rows of a convolution state."""
    flexible: bool = True
    """True if T is 1 to `rows`; False if it is always `rows`."""
    stateless: bool = False
    """True if states are inputs and outputs; see `OutsideStates`."""

    def axis(self) -> Any:
        import coremltools as ct

        if not self.flexible:
            return self.rows
        return ct.RangeDim(lower_bound=1, upper_bound=self.rows, default=1)


class _Place(NamedTuple):
    owner: nn.Module
    attribute: str
    name: str
    shape: tuple[int, ...]


def _program_name(buffer: str) -> str:
    return buffer.replace(".", "_")


def state_shapes(layer: nn.Module, index: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the states of layer `index`, by name in the program."""
    buffers = layer.named_buffers(f"layers.{index}")
    return {_program_name(name): tuple(buffer.shape) for name, buffer in buffers}


class OutsideStates:
    """The states of a module, removed from it: `load` before a pass, and `stored` after it.

    A state N is then an input `N_in` and an output `N_out`, which the engine passes to the next
    forward pass (`engine.packages.StatelessPackage`), for machines where states leave the Neural
    Engine. `write_state` assigns states that are not buffers, so nothing is written in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            _Place(owner, attribute, _program_name(f"{path}.{attribute}"), tuple(buffer.shape))
            for path, owner in module.named_modules()
            for attribute, buffer in list(owner.named_buffers(recurse=False))
        ]
        for place in self._places:
            delattr(place.owner, place.attribute)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {state_input(place.name): place.shape for place in self._places}

    @property
    def outputs(self) -> list[str]:
        return [state_output(place.name) for place in self._places]

    def load(self, states: Sequence[Tensor]) -> None:
        for place, state in zip(self._places, states, strict=True):
            setattr(place.owner, place.attribute, state)

    def stored(self) -> list[Tensor]:
        return [getattr(place.owner, place.attribute) for place in self._places]


class Layers(nn.Module):
    """A range of layers, and the hidden states tapped from them."""

    def __init__(
        self, family: Family, start: int, end: int, taps: Sequence[int], *, stateless: bool
    ) -> None:
        super().__init__()
        # Keyed by layer index, so that the names of weights and states contain it.
        self.layers = nn.ModuleDict({str(i): family.layer(i) for i in range(start, end)})
        self._names = input_names(family)
        self._taps = {str(tap) for tap in inner_taps(taps, end)}
        self._hidden_size = family.shape.hidden_size
        self.outside = OutsideStates(self) if stateless else None

    def forward(self, hidden: Tensor, *rest: Tensor) -> Any:
        """Return the stream after the last layer, tapped hidden states, and states if stateless."""
        count = len(self._names) - 1
        step = layer_inputs(dict(zip(self._names[1:], rest[:count], strict=True)))
        if self.outside is not None:
            self.outside.load(rest[count:])
        tapped = []
        for index, layer in self.layers.items():
            hidden = layer(hidden, step)
            if index in self._taps:
                tapped.append(hidden[:, : self._hidden_size])
        if self.outside is not None:
            tapped += self.outside.stored()
        return (hidden, *tapped) if tapped else hidden


class Head(nn.Module):
    """The final norm, and the head for a range of the vocabulary."""

    def __init__(self, family: Family, start: int, end: int) -> None:
        super().__init__()
        self.final = family.final()
        head = family.head()
        # A classifier's `final` computes all labels.
        self.head = nn.Identity() if head is None else projection(head[start:end])

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits: [1, stream_size, T, 1] -> [1, end - start, T, 1]."""
        logits: Tensor = self.head(self.final(hidden))
        return logits


def layer_inputs(inputs: Mapping[str, Tensor]) -> LayerInputs:
    return LayerInputs(
        inputs["rope_cos"],
        inputs["rope_sin"],
        inputs["attn_mask"],
        inputs.get("kv_write_mask", _NO_SLOTS),
        inputs.get("window_write"),
        inputs.get("window_read"),
    )


_NO_SLOTS = torch.zeros(1, 1, 0, 0)
"""A token classifier has no KV cache."""


def inner_taps(taps: Sequence[int], end: int) -> list[int]:
    """Return the tapped layers with an output of their own; see `Shard.output`."""
    return [tap for tap in taps if tap != end - 1]


def input_names(family: Family) -> list[str]:
    names = ["hidden", "rope_cos", "rope_sin", "attn_mask"]
    if family.shape.task == "token-classification":
        return names
    names.append("kv_write_mask")
    return [*names, "window_write", "window_read"] if family.shape.lags else names


def static_functions(
    package: Path, shapes: Mapping[int, Mapping[str, tuple[int, ...]]], out: Path
) -> None:
    """Save a flexible program as one function `tN` per number of rows N, with shared weights."""
    import coremltools as ct
    from coremltools.models.utils import materialize_dynamic_shape_mlmodel

    program = ct.models.MLModel(str(package), skip_model_load=True)
    functions = {f"t{rows}": dict(sizes) for rows, sizes in shapes.items()}
    with warnings.catch_warnings(action="ignore"):
        materialize_dynamic_shape_mlmodel(program, functions, str(out))
    _drop_function(out, "main", default=next(iter(functions)))


def _drop_function(package: Path, name: str, *, default: str) -> None:
    """Remove a function from a package: the flexible one, which coremltools does not remove."""
    from coremltools.proto import Model_pb2

    (path,) = package.rglob("*.mlmodel")
    spec = Model_pb2.Model.FromString(path.read_bytes())
    del spec.mlProgram.functions[name]
    described = [function for function in spec.description.functions if function.name != name]
    del spec.description.functions[:]
    spec.description.functions.extend(described)
    spec.description.defaultFunctionName = default
    path.write_bytes(spec.SerializeToString())


def input_shapes(
    family: Family, sizes: ShardSizes, rows: Any, start: int = 0
) -> dict[str, tuple[Any, ...]]:
    """Return the input shapes of layers from `start`; `rows` is a number or coremltools' range."""
    half = family.rope_tables().shape[2]
    lags = family.shape.lags
    # Attention reads the KV cache, or the rows of whole texts.
    keys = rows if family.shape.task == "token-classification" else sizes.slots
    shapes: dict[str, tuple[Any, ...]] = {
        "hidden": (1, (not start and family.shape.input_size) or family.shape.stream_size, rows, 1),
        "rope_cos": (rows, half),
        "rope_sin": (rows, half),
        "attn_mask": (1, 1, rows, keys),
        "kv_write_mask": (1, 1, sizes.slots, rows),
        "window_write": (1, 1, sizes.conv_slots, rows),
        "window_read": (1, lags, rows, sizes.conv_slots),
    }
    return {name: shapes[name] for name in input_names(family)}


def convert_layers(
    family: Family,
    start: int,
    end: int,
    *,
    sizes: ShardSizes,
    taps: Sequence[int] = (),
    rounded: bool = True,
) -> Any:
    """Convert layers [start, end) to an ML program with `hidden` in, `out_hidden` out.

    It computes in float16, or in float32 if not `rounded`; inputs, outputs and states are float16.
    Every layer N of `taps`, except the last layer, adds an output `tap_N`, [1, hidden_size, T, 1].
    """
    import coremltools as ct

    module = Layers(family, start, end, taps, stateless=sizes.stateless).eval()
    outside = module.outside
    outside_shapes = {} if outside is None else outside.shapes
    states = [
        ct.StateType(ct.TensorType(shape=buffer.shape, dtype=np.float16), name=name)
        for name, buffer in module.named_buffers()
    ]
    return _converted(
        module,
        {**input_shapes(family, sizes, sizes.rows, start), **outside_shapes},
        {**input_shapes(family, sizes, sizes.axis(), start), **outside_shapes},
        outputs=[
            "out_hidden",
            *(f"tap_{tap}" for tap in inner_taps(taps, end)),
            *(() if outside is None else outside.outputs),
        ],
        states=states,
        rounded=rounded,
    )


def convert_head(family: Family, start: int, end: int, *, sizes: ShardSizes) -> Any:
    """Convert the head for tokens [start, end) to an ML program with `hidden` in, `logits` out.

    A classifier's head has all labels, whatever `start` and `end` are.
    """
    size = family.shape.stream_size
    return _converted(
        Head(family, start, end).eval(),
        {"hidden": (1, size, sizes.rows, 1)},
        {"hidden": (1, size, sizes.axis(), 1)},
        outputs=["logits"],
        states=[],
    )


def _converted(
    module: nn.Module,
    traced_with: dict[str, tuple[int, ...]],
    shapes: dict[str, tuple[Any, ...]],
    *,
    outputs: Sequence[str],
    states: Sequence[Any],
    rounded: bool = True,
) -> Any:
    import coremltools as ct

    example = tuple(torch.zeros(shape) for shape in traced_with.values())
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        # Trace with the maximum rows: with one row, the trace would treat the axis as constant.
        traced = torch.jit.trace(module, example, check_trace=False)
        return ct.convert(
            traced,
            inputs=[
                ct.TensorType(name=name, shape=shape, dtype=np.float16)
                for name, shape in shapes.items()
            ],
            outputs=[ct.TensorType(name=name, dtype=np.float16) for name in outputs],
            states=list(states) or None,
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=ct.precision.FLOAT16 if rounded else ct.precision.FLOAT32,
            compute_units=ct.ComputeUnit.CPU_AND_NE,
            skip_model_load=True,
        )
