"""Queries about a package's function: producers of values, constants, declared shapes."""

from collections.abc import Iterator, Set
from functools import cached_property
from typing import Any, Final

import numpy as np

from paceline_coreml.rehearsal.program import MilFunction, MilPackage, Op, Operand, Value
from paceline_coreml.rehearsal.weights import Constant

STORAGE_PREFIXES: Final = ("const", "constexpr_")
"""Type prefixes of operations that only declare stored data; they do not run."""

MOVE_OPS: Final = frozenset({"reshape", "transpose", "expand_dims", "squeeze", "identity"})
"""Operations that only move the elements of one operand."""


class Program:
    """A function of a package."""

    def __init__(self, package: MilPackage, function: MilFunction) -> None:
        self.package, self.function = package, function
        self._all = list(function.block.walk())
        self.ops = [op for op in self._all if not op.type.startswith(STORAGE_PREFIXES)]
        """All operations that compute, including those of nested blocks."""
        self._makers = {out.name: op for op in self._all for out in op.outputs}
        self._values = {value.name: value for value in function.block.inputs}
        self._values |= {out.name: out for op in self._all for out in op.outputs}

    @property
    def stateful(self) -> bool:
        return bool(self.function.states)

    @property
    def flexible(self) -> bool:
        """True if an input may have more than one shape."""
        return any(not feature.is_static for feature in self.function.inputs)

    def value(self, operand: Operand | None) -> Value | None:
        """Return an operand's name and declared type, or None for an inline constant."""
        return self._values.get(operand) if isinstance(operand, str) else None

    def maker(self, operand: Operand | None) -> Op | None:
        """Return the operation that produces an operand; None for inputs and inline constants."""
        return self._makers.get(operand) if isinstance(operand, str) else None

    def origin(self, operand: Operand | None, through: Set[str] = MOVE_OPS) -> Operand | None:
        """Return the operand before operations that only move its elements."""
        maker = self.maker(operand)
        while maker is not None and maker.type in through:
            operand = first(maker, "x")
            maker = self.maker(operand)
        return operand

    def constant(self, operand: Operand | None) -> bool:
        """Return True if an operand is the same in every run."""
        if operand is None or isinstance(operand, Constant):
            return operand is not None
        return operand in self._constants

    @cached_property
    def _constants(self) -> set[str]:
        names: set[str] = set()
        for op in self._all:
            operands = [operand for several in op.inputs.values() for operand in several]
            stored = op.type.startswith(STORAGE_PREFIXES)
            if stored or (
                operands
                and not op.blocks
                and all(isinstance(operand, Constant) or operand in names for operand in operands)
            ):
                names |= {out.name for out in op.outputs}
        return names

    @cached_property
    def sizes(self) -> set[str]:
        """The values that depend only on shapes, not on data."""
        names: set[str] = set()
        for op in self.ops:
            operands = [operand for several in op.inputs.values() for operand in several]
            known = all(self.constant(operand) or operand in names for operand in operands)
            of_sizes = any(isinstance(operand, str) and operand in names for operand in operands)
            if op.type == "shape" or (known and of_sizes):
                names |= {out.name for out in op.outputs}
        return names

    def stored(self) -> Iterator[tuple[Op, Constant]]:
        """Yield every stored constant, with its operation."""
        for op in self._all:
            for operands in op.inputs.values():
                for operand in operands:
                    if isinstance(operand, Constant):
                        yield op, operand

    def storage_ops(self, kind: str) -> Iterator[Op]:
        """Yield the operations of a type that declares how a weight is stored."""
        return (op for op in self._all if op.type == kind)

    def stored_constant(self, operand: Operand | None) -> Constant | None:
        """Return the stored constant behind an operand, or None."""
        if isinstance(operand, Constant):
            return operand
        maker = self.maker(operand)
        if maker is None or maker.type != "const":
            return None
        held = first(maker, "val")
        return held if isinstance(held, Constant) else None

    def numbers(self, op: Op, parameter: str) -> Any:
        """Return a constant parameter as an array, or None if it is absent or computed."""
        constant = self.stored_constant(first(op, parameter))
        return None if constant is None else np.asarray(constant.value())

    def shape_of(self, operand: Operand | None) -> tuple[int | None, ...] | None:
        if isinstance(operand, Constant):
            return operand.shape
        value = self.value(operand)
        return None if value is None else value.shape


def first(op: Op, parameter: str) -> Operand | None:
    """Return the first operand of a parameter, or None."""
    operands = op.inputs.get(parameter, ())
    return operands[0] if operands else None


def shape_text(shape: tuple[int | None, ...]) -> str:
    return str(["T" if size is None else size for size in shape]).replace("'", "")
