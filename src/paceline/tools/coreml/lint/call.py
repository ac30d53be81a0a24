"""One operation of a program with what is known of its operands, and who can follow which kind.

Knows no operation in particular: `places.py` and `sums.py` enter them here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.engines.coreml.rehearsal.program import Op, Operand
from paceline.tools.coreml.lint.layout import Declared, Layout, Unfollowed
from paceline.tools.coreml.lint.program import Program, first


@dataclass(frozen=True, slots=True)
class Call:
    """One operation with what is known of its operands."""

    op: Op
    program: Program
    layouts: Callable[[Operand | None], Layout | None]
    """Of an operand; None: nobody knows."""
    count: int | None
    """T, if it is fixed."""

    @property
    def declared(self) -> list[Declared]:
        """The shapes of its outputs."""
        return [out.shape for out in self.op.outputs]

    def given(self, parameter: str = "x") -> Layout:
        """An operand that must be there."""
        found = self.layouts(first(self.op, parameter))
        if found is None:
            raise Unfollowed(f"has no {parameter}")
        return found

    def all_given(self) -> list[Layout]:
        """All operands."""
        return [
            layout
            for operands in self.op.inputs.values()
            for one in operands
            if (layout := self.layouts(one)) is not None
        ]

    def ints(self, parameter: str, default: Sequence[int] | None = None) -> list[int]:
        """Constant whole numbers, or truths."""
        found = self.program.numbers(self.op, parameter)
        if found is None:
            if default is None or parameter in self.op.inputs:
                raise Unfollowed(f"has no constant {parameter}")
            return list(default)
        return [int(one) for one in found.reshape(-1).tolist()]

    def text(self, parameter: str, default: str) -> str:
        """A constant text."""
        found: Any = self.program.numbers(self.op, parameter)
        return default if found is None else str(found)


KINDS: Final[dict[str, Callable[[Call], Sequence[Layout]]]] = {}
"""What comes of operations some of whose operands have rows."""


def kind(*names: str) -> Callable[[Callable[[Call], Any]], Callable[[Call], Any]]:
    """Enter a function that follows operations of these kinds: one layout, or several."""

    def enter(follow: Callable[[Call], Any]) -> Callable[[Call], Any]:
        def several(call: Call) -> Sequence[Layout]:
            made = follow(call)
            return [made] if isinstance(made, Layout) else made

        KINDS.update(dict.fromkeys(names, several))
        return follow

    return enter
