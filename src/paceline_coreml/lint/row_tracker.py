"""Tracks row axes through a program, operation by operation.

It reports events at operations, which `row_order` turns into rules. It never guesses: rows that it
cannot track are reported as untracked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from paceline_coreml.lint import compute_ops, move_ops
from paceline_coreml.lint.op_handlers import HANDLERS, OpContext
from paceline_coreml.lint.program import Program
from paceline_coreml.lint.row_layout import (
    ROWS,
    Axis,
    Declared,
    Layout,
    RowsMixed,
    Untracked,
    broadcast,
    without_rows,
)
from paceline_coreml.rehearsal.program import Op, Operand
from paceline_coreml.rehearsal.weights import Constant

_MODULES: Final = (move_ops, compute_ops)
"""Imported so that they register their handlers."""

_BETWEEN_ROWS: Final = {"read_state", "matmul", "conv"}
"""Operations that may read other rows: through a state, or with weights per row."""


class RowEvent(NamedTuple):
    """A problem with rows at an operation."""

    kind: Literal["mixed", "untracked", "wrong-shape"]
    where: str
    what: str


class RowTracker:
    """A tracker for the row layouts of all values of a program."""

    def __init__(self, program: Program, rows: Mapping[str, Sequence[int]], count: int | None):
        """Prepare with `rows`, input name -> its row axes, and `count`, T if it is fixed."""
        self.program, self._rows, self.count = program, rows, count
        self.layouts: dict[str, Layout | None] = {}
        """Layouts by name; None where rows could not be tracked."""

    def run(self) -> Iterator[RowEvent]:
        """Track the whole program. Call it once."""
        for value in self.program.function.block.inputs:
            axes = [
                ROWS if number in self._rows.get(value.name, ()) else Axis(size or 0)
                for number, size in enumerate(value.shape)
            ]
            self.layouts[value.name] = Layout(tuple(axes))
        for op in self.program.ops:
            yield from self._track(op)

    def layout(self, operand: Operand | None) -> Layout | None:
        """Return an operand's layout, or None if it is unknown."""
        if isinstance(operand, Constant):
            return without_rows(operand.shape, constant=True)
        if operand is None or operand in self.layouts:
            return self.layouts.get(operand or "")
        shape = self.program.shape_of(operand)
        return None if shape is None or None in shape else without_rows(shape, constant=True)

    def _track(self, op: Op) -> Iterator[RowEvent]:
        call = OpContext(op, self.program, self.layout, self.count)
        self.layouts |= dict.fromkeys((out.name for out in op.outputs), None)
        operands = [self.layout(operand) for several in op.inputs.values() for operand in several]
        if None in operands:
            return
        try:
            results = self._results(call, [layout for layout in operands if layout is not None])
        except RowsMixed as error:
            yield RowEvent("mixed", op.name, f"{op.type} {error}")
            return
        except Untracked as error:
            yield RowEvent("untracked", op.name, f"{op.type} {error}")
            return
        for out, layout in zip(op.outputs, results, strict=False):
            self.layouts[out.name] = layout
            if not _declares(out.shape, layout, self.count):
                yield RowEvent(
                    "wrong-shape", op.name, f"{op.type} is {layout}, declared {list(out.shape)}"
                )

    def _results(self, call: OpContext, layouts: Sequence[Layout]) -> Sequence[Layout]:
        constant = all(layout.constant for layout in layouts)
        if not any(layout.rows for layout in layouts):
            of_many = any(layout.from_many_rows for layout in layouts)
            from_many_rows = of_many and call.op.type not in _BETWEEN_ROWS
            if from_many_rows and call.op.type in compute_ops.BROADCASTING:
                return [broadcast(layouts, self.count)]
            results = [without_rows(shape, constant=constant) for shape in call.declared]
            return [replace(result, from_many_rows=from_many_rows) for result in results]
        if call.op.type not in HANDLERS:
            raise Untracked("has no handler")
        return HANDLERS[call.op.type](call)


def _declares(shape: Declared, layout: Layout, count: int | None) -> bool:
    if len(shape) != len(layout.axes):
        return False
    for size, axis in zip(shape, layout.axes, strict=True):
        times = 1 if not axis.rows else count
        expected = None if times is None else math.prod((axis.before, times, axis.after))
        if size != expected:
            return False
    return True
