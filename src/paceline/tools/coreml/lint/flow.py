"""Where the rows go in a program, from its inputs to its outputs, operation by operation.

Knows no rule: it says what happened, at which operation. What cannot be followed is not guessed at:
the rows are then lost from sight, which is said, too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from paceline.engines.coreml.rehearsal.program import Op, Operand
from paceline.engines.coreml.rehearsal.weights import Constant
from paceline.tools.coreml.lint import places, sums
from paceline.tools.coreml.lint.call import KINDS, Call
from paceline.tools.coreml.lint.layout import (
    ROWS,
    Axis,
    Declared,
    Layout,
    Mixed,
    Unfollowed,
    plain,
    together,
)
from paceline.tools.coreml.lint.program import Program

_MODULES: Final = (places, sums)
"""They enter what they can follow in `KINDS`."""

_MADE_OF_NOTHING: Final = {"fill", "fill_like"}
_BETWEEN_ROWS: Final = {
    "read_state", "matmul", "conv", "linear", "scaled_dot_product_attention",
}  # fmt: skip
"""Operations by which a row may see others: through what is kept, or a weight for each."""


class Event(NamedTuple):
    """Something that happens to rows."""

    kind: Literal["mixed", "unfollowed", "misdeclared"]
    where: str
    what: str


class Flow:
    """A program's values, followed one by one."""

    def __init__(self, program: Program, rows: Mapping[str, Sequence[int]], count: int | None):
        """`rows` are the axes of the inputs that rows stand on, `count` is T if it is fixed."""
        self.program, self._rows, self.count = program, rows, count
        self.layouts: dict[str, Layout | None] = {}
        """None: rows were lost from sight on the way."""

    def run(self) -> Iterator[Event]:
        """Follow all of it; once for all."""
        for value in self.program.function.block.inputs:
            axes = [
                ROWS if number in self._rows.get(value.name, ()) else Axis(size or 0)
                for number, size in enumerate(value.shape)
            ]
            self.layouts[value.name] = Layout(tuple(axes))
        for op in self.program.ops:
            yield from self._follow(op)

    def layout(self, operand: Operand | None) -> Layout | None:
        """Where the rows are in an operand; None: nobody knows."""
        if isinstance(operand, Constant):
            return plain(operand.shape, constant=True)
        if operand is None or operand in self.layouts:
            return self.layouts.get(operand or "")
        shape = self.program.shape_of(operand)
        return None if shape is None or None in shape else plain(shape, constant=True)

    def _follow(self, op: Op) -> Iterator[Event]:
        call = Call(op, self.program, self.layout, self.count)
        self.layouts |= dict.fromkeys((out.name for out in op.outputs), None)
        given = [self.layout(one) for several in op.inputs.values() for one in several]
        if None in given:
            return
        try:
            made = self._made(call, [one for one in given if one is not None])
        except Mixed as error:
            yield Event("mixed", op.name, f"{op.type} {error}")
            return
        except Unfollowed as error:
            yield Event("unfollowed", op.name, f"{op.type} {error}")
            return
        for out, layout in zip(op.outputs, made, strict=False):
            self.layouts[out.name] = layout
            if not _declares(out.shape, layout, self.count):
                yield Event(
                    "misdeclared", op.name, f"{op.type} makes {layout}, {list(out.shape)} is said"
                )

    def _made(self, call: Call, given: Sequence[Layout]) -> Sequence[Layout]:
        constant = all(one.constant for one in given)
        if call.op.type in _MADE_OF_NOTHING:
            return [_open(shape, self.count) for shape in call.declared]
        if not any(one.rows for one in given):
            across = any(one.across for one in given) and call.op.type not in _BETWEEN_ROWS
            if across and call.op.type in sums.SPREADING:
                return [together(given, self.count)]
            made = [plain(shape, constant=constant) for shape in call.declared]
            return [replace(one, across=across) for one in made]
        if call.op.type not in KINDS:
            raise Unfollowed("is not followed here")
        return KINDS[call.op.type](call)


def _open(shape: Declared, count: int | None) -> Layout:
    """Numbers that are made of none: rows stand where the shape is open."""
    if count is not None:
        return plain(shape, constant=True)
    return Layout(tuple(ROWS if size is None else Axis(size) for size in shape), constant=True)


def _declares(shape: Declared, layout: Layout, count: int | None) -> bool:
    """Whether a declared shape is that of a layout."""
    if len(shape) != len(layout.axes):
        return False
    for size, axis in zip(shape, layout.axes, strict=True):
        times = 1 if not axis.rows else count
        expected = None if times is None else math.prod((axis.before, times, axis.after))
        if size != expected:
            return False
    return True
