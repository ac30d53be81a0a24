"""What a case of an operation is: how MIL builds it, and what torch says it is.

`build` gets coremltools' builder and a variable for each input; `expected` gets the inputs as
torch tensors. An input is given by its shape (normally distributed numbers) or by its numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Given = tuple[int, ...] | np.ndarray


@dataclass(frozen=True, eq=False)
class Case:
    op: str
    build: Callable[..., Any]
    inputs: tuple[Given, ...]
    expected: Callable[..., Any]
    what: str = ""
    target: str = "iOS18"
    state: tuple[int, ...] | None = None
    """The shape of the state that the case reads or writes, where it does."""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.op, self.what, self.target.removeprefix("iOS18")]))

    def numbers(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [
            rng.normal(size=one).astype(np.float32) if isinstance(one, tuple) else one
            for one in self.inputs
        ]


def whole(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.int32)


def real(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.float32)


RNG = np.random.default_rng(1)


def weights(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def entering(cases: list[Case]) -> Callable[..., None]:
    """Adds a case to a list: operation, inputs, `build`, `expected`, what is special about it."""

    def case(
        op: str,
        inputs: tuple[Given, ...],
        build: Callable[..., Any],
        expected: Callable[..., Any],
        what: str = "",
        **more: Any,
    ) -> None:
        cases.append(Case(op, build, inputs, expected, what, **more))

    return case


POSITIVE = np.abs(np.random.default_rng(2).normal(size=(2, 5))).astype(np.float32) + 0.1
SOME = real([-3.0, -1.5, -0.5, 0.0], [0.5, 1.0, 2.5, 20.0])
OTHER = real([-2.0, 1.5, 0.5, -0.75], [0.25, -1.0, 2.5, 3.0])
