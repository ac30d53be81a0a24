"""The registry of functions that compute the row layout of an operation's outputs.

`move_ops` and `compute_ops` register their handlers here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline_coreml.lint.program import Program, first
from paceline_coreml.lint.row_layout import Declared, Layout, Untracked
from paceline_coreml.rehearsal.program import Op, Operand


@dataclass(frozen=True, slots=True)
class OpContext:
    """An operation and the layouts of its operands."""

    op: Op
    program: Program
    layouts: Callable[[Operand | None], Layout | None]
    """Returns an operand's layout, or None if it is unknown."""
    count: int | None
    """T if it is fixed, else None."""

    @property
    def declared(self) -> list[Declared]:
        return [out.shape for out in self.op.outputs]

    def operand(self, parameter: str = "x") -> Layout:
        """Return a required operand's layout. Raises Untracked if it is absent."""
        layout = self.layouts(first(self.op, parameter))
        if layout is None:
            raise Untracked(f"has no {parameter}")
        return layout

    def operands(self) -> list[Layout]:
        return [
            layout
            for operands in self.op.inputs.values()
            for operand in operands
            if (layout := self.layouts(operand)) is not None
        ]

    def ints(self, parameter: str, default: Sequence[int] | None = None) -> list[int]:
        """Return constant integers or booleans. Raises Untracked if they are not constant."""
        array = self.program.numbers(self.op, parameter)
        if array is None:
            if default is None or parameter in self.op.inputs:
                raise Untracked(f"has no constant {parameter}")
            return list(default)
        return [int(number) for number in array.reshape(-1).tolist()]


HANDLERS: Final[dict[str, Callable[[OpContext], Sequence[Layout]]]] = {}
"""Operation type -> function for its outputs' layouts, if operands have rows."""


def handles(*types: str) -> Callable[[Callable[[OpContext], Any]], Callable[[OpContext], Any]]:
    """Register a handler that returns one or several layouts."""

    def register(handler: Callable[[OpContext], Any]) -> Callable[[OpContext], Any]:
        def layouts(call: OpContext) -> Sequence[Layout]:
            layout = handler(call)
            return [layout] if isinstance(layout, Layout) else layout

        HANDLERS.update(dict.fromkeys(types, layouts))
        return handler

    return register
