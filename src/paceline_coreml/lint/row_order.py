"""Rules about the order of rows: permuted heads and tokens, or mixed rows.

An attention output flattened as [head, token, dim] instead of [head, dim, token] is correct for one
row and wrong for more. So is a wrong split into heads, a sum over the wrong axis, or a trace with
one row. Rows may depend on other rows only through states and masks. These faults are thus found by
tracking the row axis through the program, from its inputs to its outputs, without running it.

This needs neither inputs nor time, names the operation, and is valid for every T and all weights.
It does not check the order of heads, or masks; `paceline coreml golden` does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, Literal

from paceline_coreml.lint.program import Program
from paceline_coreml.lint.row_layout import (
    BROADCASTING,
    ROWS,
    Axis,
    Layout,
    RowsMixed,
    Untracked,
    broadcast,
    results_of,
    without_rows,
)
from paceline_coreml.lint.rules import Fault, program_rule
from paceline_coreml.rehearsal.ops import OPS
from paceline_coreml.rehearsal.program import MilFunction, Op, Operand
from paceline_coreml.rehearsal.weights import Constant

_ROW_AXES: Final[Mapping[str, tuple[int, ...]]] = {
    "hidden": (2,),
    "rope_cos": (0,),
    "rope_sin": (0,),
    "attn_mask": (2,),
    "kv_write_mask": (3,),
    "window_write": (3,),
    "window_read": (2,),
}
"""Row axes of the inputs of paceline's shards."""

_BETWEEN_ROWS: Final = {"read_state", "matmul", "conv"}
"""Operations that may read other rows: through a state, or with weights per row."""


@program_rule(
    "high", "the seed experiments, ane-book 26: heads and tokens permuted, invisible with one row"
)
def row_order(program: Program) -> Iterator[Fault]:
    """Keep rows separate from each other, heads and channels; T = 1 hides such faults."""
    yield from _of_kind(program, "mixed")


@program_rule("medium", "paceline: an untracked operation is not proven correct")
def row_order_unknown(program: Program) -> Iterator[Fault]:
    """Compare blocks with single rows (golden): rows could not be tracked through the program."""
    yield from _of_kind(program, "untracked")


@program_rule(
    "high", "paceline: coremltools 9 does so for a select of two numbers; the emulator rejects it"
)
def declared_shape(program: Program) -> Iterator[Fault]:
    """Correct the declared shape, which differs from the operation's output."""
    yield from _of_kind(program, "wrong-shape")


def _of_kind(program: Program, kind: str) -> Iterator[Fault]:
    return (fault for found, fault in _events(program) if found == kind)


RowEvent = tuple[Literal["mixed", "untracked", "wrong-shape"], Fault]
"""A problem with rows."""


@lru_cache(maxsize=4)  # functions of a package
def _events(program: Program) -> Sequence[RowEvent]:
    """Track a program's rows; cached, because three rules use the result."""
    axes, count = row_axes_of(program)
    if not any(axes.values()):
        return [("untracked", Fault("", "the row axes of the inputs are unknown"))]
    if count == 1:  # one row has no order
        return []
    tracker = RowTracker(program, axes, count)
    return list(tracker.run())


class RowTracker:
    """A tracker for the row layouts of all values of a program."""

    def __init__(self, program: Program, rows: Mapping[str, Sequence[int]], count: int | None):
        """Prepare with `rows`, input name -> its row axes, and `count`, T if it is fixed."""
        self._program, self._count = program, count
        self.layouts: dict[str, Layout | None] = {
            value.name: Layout(
                tuple(
                    ROWS if number in rows.get(value.name, ()) else Axis(size or 0)
                    for number, size in enumerate(value.shape)
                )
            )
            for value in program.function.block.inputs
        }
        """Layouts by name; None where rows could not be tracked."""

    def run(self) -> Iterator[RowEvent]:
        """Track the whole program. Call it once."""
        for op in self._program.ops:
            self.layouts |= dict.fromkeys((out.name for out in op.outputs), None)
            try:
                results = self._results(op)
            except RowsMixed as error:
                yield "mixed", Fault(op.name, f"{op.type} {error}")
                continue
            except Untracked as error:
                yield "untracked", Fault(op.name, f"{op.type} {error}")
                continue
            for out, layout in zip(op.outputs, results, strict=False):
                self.layouts[out.name] = layout
                if not self._declares(out.shape, layout):
                    what = f"{op.type} is {layout}, declared {list(out.shape)}"
                    yield "wrong-shape", Fault(op.name, what)
        for name in self._program.function.block.outputs:
            made = self._layout(name)
            if made is not None and any(axis.rows and not axis.rows_only for axis in made.axes):
                yield "mixed", Fault(name, f"is {made}; expected an axis for the rows")

    def _results(self, op: Op) -> Sequence[Layout]:
        """Return the layouts of an operation's outputs; empty if operands are unknown."""
        operands = {
            parameter: [self._layout(operand) for operand in several]
            for parameter, several in op.inputs.items()
        }
        layouts = [layout for several in operands.values() for layout in several if layout]
        if len(layouts) < sum(map(len, operands.values())):
            return []
        if any(layout.rows for layout in layouts):
            results = results_of(op.type, self._arguments(op, operands), self._count)
            return [results] if isinstance(results, Layout) else results
        of_many = any(layout.from_many_rows for layout in layouts) and op.type not in _BETWEEN_ROWS
        if of_many and op.type in BROADCASTING:
            return [broadcast(layouts, self._count)]
        constant = all(layout.constant for layout in layouts)
        made = [without_rows(out.shape, constant=constant) for out in op.outputs]
        return [replace(layout, from_many_rows=of_many) for layout in made]

    def _arguments(self, op: Op, operands: Mapping[str, Sequence[Layout | None]]) -> dict[str, Any]:
        """Return an operation's arguments for the emulator, with layouts in place of arrays."""
        if op.type not in OPS:
            raise Untracked("has no handler")
        entry, arguments = OPS[op.type], dict[str, Any]()
        if not entry.required <= op.inputs.keys() <= entry.forms.keys():
            raise Untracked(f"has the parameters {', '.join(op.inputs)}")
        for parameter, layouts in operands.items():
            form = entry.forms.get(parameter)
            if parameter in entry.several:
                arguments[parameter] = layouts
            elif form is None:
                arguments[parameter] = layouts[0]
            elif (constant := self._program.numbers(op, parameter)) is None:
                raise Untracked(f"has no constant {parameter}")
            else:
                arguments[parameter] = form(constant)
        return arguments

    def _layout(self, operand: Operand) -> Layout | None:
        """Return an operand's layout, or None if it is unknown."""
        if isinstance(operand, Constant):
            return without_rows(operand.shape, constant=True)
        if operand in self.layouts:
            return self.layouts[operand]
        shape = self._program.shape_of(operand)
        return None if shape is None or None in shape else without_rows(shape, constant=True)

    def _declares(self, shape: Sequence[int | None], layout: Layout) -> bool:
        """Return True if a declared shape is a layout's; the length of rows may not be known."""
        expected = [
            None if axis.rows and self._count is None else axis.length(self._count or 0)
            for axis in layout.axes
        ]
        return list(shape) == expected


def row_axes_of(program: Program) -> tuple[Mapping[str, Sequence[int]], int | None]:
    """Return the row axes by input, none if they are unknown, and T if it is fixed.

    Row axes are the flexible ones. A static function is assumed to have the inputs of paceline's
    shards.
    """
    inputs = {value.name: value.shape for value in program.function.block.inputs}
    if program.flexible:
        axes = {
            name: [n for n, size in enumerate(shape) if size is None]
            for name, shape in inputs.items()
        }
        return (axes if len(_ranges(program.function)) == 1 else {}), None
    hidden = inputs.get("hidden", ())
    if len(hidden) != 4:
        return {}, None
    known = dict(_ROW_AXES)
    if "kv_write_mask" not in inputs:
        known["attn_mask"] = (2, 3)  # a classifier's rows attend to each other
    count = hidden[2]
    rows = {
        name: [axis for axis in known.get(name, ()) if shape[axis : axis + 1] == (count,)]
        for name, shape in inputs.items()
    }
    return rows, count


def _ranges(function: MilFunction) -> set[tuple[int | None, ...]]:
    """Return the distinct length ranges of the flexible axes."""
    return {
        tuple(sorted({shape[axis] for shape in feature.choices}))
        if feature.choices
        else (feature.lower[axis], feature.upper[axis])
        for feature in function.inputs
        for axis in range(len(feature.shape))
        if feature.lower[axis] != feature.upper[axis]
        or len({shape[axis] for shape in feature.choices}) > 1
    }
