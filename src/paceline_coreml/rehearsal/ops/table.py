"""The table of operations: names, accepted constants, and the functions that compute them.

A function gets a MIL operation's parameters with MIL's names, and returns its output or a tuple of
outputs. Its annotations are the types of its parameters, by default arrays. Opening a package with
an unknown parameter, or a constant that is not accepted, fails.

Arithmetic is in float32, or in the integers' own type. Functions do not convert or round results:
the caller does. Invariant of this folder: a token's row does not depend on other rows (see
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
    """Parameter -> conversion of an array or string to the type that `run` expects."""
    required: frozenset[str]
    accepts: Mapping[str, frozenset[Any]]
    """Parameter -> its accepted constants."""
    moves: bool
    """True if it only moves numbers, so that nothing must be rounded."""
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
    """Return the conversion of a value to an annotation's type, or None for arrays."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    optional = isinstance(annotation, UnionType) and len(kinds) == 1
    return _FORMS.get(kinds[0] if optional else annotation)


def _ints(value: Array) -> Ints:
    return tuple(int(number) for number in np.ravel(value).tolist())


def _bools(value: Array) -> Bools:
    return tuple(bool(flag) for flag in np.ravel(value).tolist())


_FORMS: dict[Any, Callable[[Any], Any]] = {
    str: str,
    int: int,
    float: float,
    bool: bool,
    Ints: _ints,
    Bools: _bools,
}
