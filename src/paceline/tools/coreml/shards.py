"""From layers in torch to a Core ML package: traced with the most rows, its rows left flexible.

Knows coremltools. Knows no family, no folder and no manifest. What a shard takes and gives is said
here once; `engines/coreml` is the other side.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.tools.coreml.family import Family
from paceline.tools.coreml.layers import projection
from paceline.tools.coreml.run import step_of


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the inputs of a shard are as large as."""

    rows: int
    """The most rows of a call: T is 1 to this."""
    slots: int
    """Slots for keys and values: the longest text."""
    ring: int
    """Places for recent rows, where a family has windows."""


class Layers(nn.Module):
    """Some layers after another, and what a drafter taps of them."""

    def __init__(self, family: Family, start: int, end: int, taps: Sequence[int]) -> None:
        super().__init__()
        # By their numbers in the model, which the names of weights and states then have.
        self.layers = nn.ModuleDict({str(i): family.layer(i) for i in range(start, end)})
        self._names = input_names(family)
        self._taps = {str(tap) for tap in taps}
        self._hidden_size = family.shape.hidden_size

    def forward(self, hidden: Tensor, *rest: Tensor) -> Any:
        """The stream after the last layer; behind it the tapped hidden states."""
        step = step_of(dict(zip(self._names[1:], rest, strict=True)))
        tapped = []
        for index, layer in self.layers.items():
            hidden = layer(hidden, step)
            if index in self._taps:
                tapped.append(hidden[:, : self._hidden_size])
        return (hidden, *tapped) if tapped else hidden


class Head(nn.Module):
    """The final norm, and the head for a part of the vocabulary."""

    def __init__(self, family: Family, start: int, end: int) -> None:
        super().__init__()
        self.final = family.final()
        head = family.head()
        # A classifier's labels come out of `final`, all of them.
        self.head = nn.Identity() if head is None else projection(head[start:end])

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, stream_size, T, 1] -> logits [1, end - start, T, 1]."""
        logits: Tensor = self.head(self.final(hidden))
        return logits


def input_names(family: Family) -> list[str]:
    """What a shard of layers takes, in order."""
    names = ["hidden", "rope_cos", "rope_sin", "attn_mask"]
    if family.shape.kind == "token-classification":
        return names
    names.append("kv_write_mask")
    return [*names, "window_write", "window_read"] if family.shape.lags else names


def shapes_of(family: Family, sizes: Sizes, rows: int, *, head: bool) -> dict[str, Any]:
    """The shapes of the inputs of a shard of layers, or of the head, for `rows` rows."""
    if head:
        return {"hidden": (1, family.shape.stream_size, rows, 1)}
    return input_shapes(family, sizes, rows)


def static_functions(
    package: Path, shapes: Mapping[int, Mapping[str, tuple[int, ...]]], out: Path
) -> None:
    """The same program as a function `tN` for each number of rows, which share their weights."""
    import coremltools as ct
    from coremltools.models.utils import materialize_dynamic_shape_mlmodel

    program = ct.models.MLModel(str(package), skip_model_load=True)
    functions = {f"t{rows}": dict(each) for rows, each in shapes.items()}
    with _quiet():
        materialize_dynamic_shape_mlmodel(program, functions, str(out))


def input_shapes(family: Family, sizes: Sizes, rows: Any) -> dict[str, tuple[Any, ...]]:
    """The shapes of a shard's inputs for `rows` rows, a number or a range."""
    turned = family.tables().cos.shape[1]
    lags = family.shape.lags
    # Rows see slots, or, of whole texts, each other.
    seen = rows if family.shape.kind == "token-classification" else sizes.slots
    shapes: dict[str, tuple[Any, ...]] = {
        "hidden": (1, family.shape.stream_size, rows, 1),
        "rope_cos": (rows, turned),
        "rope_sin": (rows, turned),
        "attn_mask": (1, 1, rows, seen),
        "kv_write_mask": (1, 1, sizes.slots, rows),
        "window_write": (1, 1, sizes.ring, rows),
        "window_read": (1, lags, rows, sizes.ring),
    }
    return {name: shapes[name] for name in input_names(family)}


def convert_layers(
    family: Family, start: int, end: int, *, sizes: Sizes, taps: Sequence[int] = ()
) -> Any:
    """Layers [start, end) as an ML program, in float16: `hidden` in, `out_hidden` out.

    `tap_N` comes out for every layer N of `taps`, [1, hidden_size, T, 1].
    """
    import coremltools as ct

    module = Layers(family, start, end, taps).eval()
    states = [
        ct.StateType(ct.TensorType(shape=buffer.shape, dtype=np.float16), name=name)
        for name, buffer in module.named_buffers()
    ]
    rows = ct.RangeDim(lower_bound=1, upper_bound=sizes.rows, default=1)
    return _converted(
        module,
        input_shapes(family, sizes, sizes.rows),
        input_shapes(family, sizes, rows),
        outputs=["out_hidden", *(f"tap_{tap}" for tap in taps)],
        states=states,
    )


def convert_head(family: Family, start: int, end: int, *, sizes: Sizes) -> Any:
    """The head for tokens [start, end) as an ML program: `hidden` in, `logits` out.

    A classifier's has all labels, whatever `start` and `end` are.
    """
    import coremltools as ct

    size = family.shape.stream_size
    rows = ct.RangeDim(lower_bound=1, upper_bound=sizes.rows, default=1)
    return _converted(
        Head(family, start, end).eval(),
        {"hidden": (1, size, sizes.rows, 1)},
        {"hidden": (1, size, rows, 1)},
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
) -> Any:
    import coremltools as ct

    example = tuple(torch.zeros(shape) for shape in traced_with.values())
    with torch.no_grad(), _quiet():
        # Traced with the most rows: with one, an axis of one row would be taken for no axis.
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
            compute_precision=ct.precision.FLOAT16,
            compute_units=ct.ComputeUnit.CPU_AND_NE,
            skip_model_load=True,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the converter's own progress bars and warnings: ours says how far it is."""
    log = logging.getLogger("coremltools")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
