"""The table of operations: name, accepted constants, and the function that computes it.

A function takes a MIL operation's parameters under MIL's names and returns its output or a tuple of
outputs. Its annotations give the forms of its parameters. A package with an unknown parameter or a
constant that is not accepted fails when it is opened.

Arithmetic is float32, or the integers' own. A function does not convert or round its result: the
caller does. Invariant of this folder: a token's row does not depend on the other rows (how: see
`products.py`, `reductions.py`, `elementwise.py`).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]
Ints = tuple[int, ...]
Bools = tuple[bool, ...]


@dataclass(slots=True)
class Cell:
    array: Array


class Entry(NamedTuple):
    run: Callable[..., Any]
    forms: Mapping[str, Callable[[Any], Any] | None]
    """Parameter -> conversion of an array or string to the form that `run` expects."""
    required: frozenset[str]
    accepts: Mapping[str, frozenset[Any]]
    """Parameter -> its accepted constants."""
    moves: bool
    """True if it only moves numbers, so that nothing needs rounding."""
    several: frozenset[str]
    """Parameters that take any number of operands."""


_Run = TypeVar("_Run", bound=Callable[..., Any])
_NEEDED = inspect.Parameter.empty

OPS: dict[str, Entry] = {}
"""Every supported operation, by its MIL name."""


def op(
    *names: str,
    moves: bool = False,
    **accepts: tuple[Any, ...],
) -> Callable[[_Run], _Run]:
    """Register a function under these names; `accepts`: allowed constants by parameter."""

    def register(run: _Run) -> _Run:
        parameters = inspect.signature(run).parameters
        entry = Entry(
            run,
            {name: _form(parameter.annotation) for name, parameter in parameters.items()},
            frozenset(
                name for name, parameter in parameters.items() if parameter.default is _NEEDED
            ),
            {name: frozenset(values) for name, values in accepts.items()},
            moves,
            frozenset(
                name for name, parameter in parameters.items() if parameter.annotation == Arrays
            ),
        )
        OPS.update(dict.fromkeys(names, entry))
        return run

    return register


def _form(annotation: Any) -> Callable[[Any], Any] | None:
    """Conversion of a value to the form of an annotation; None: no conversion."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    optional = isinstance(annotation, UnionType) and len(kinds) == 1
    return _FORMS[kinds[0] if optional else annotation]


def _ints(value: Array) -> Ints:
    return tuple(int(number) for number in np.ravel(value).tolist())


def _bools(value: Array) -> Bools:
    return tuple(bool(flag) for flag in np.ravel(value).tolist())


_FORMS: dict[Any, Callable[[Any], Any] | None] = {
    Array: None,
    Arrays: None,
    Cell: None,
    str: str,
    int: int,
    float: float,
    bool: bool,
    Ints: _ints,
    Bools: _bools,
}
