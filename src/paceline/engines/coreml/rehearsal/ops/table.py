"""The table of operations: what each is called, what it accepts, and the function that computes it.

A function takes a MIL operation's parameters under MIL's own names and returns its output, or a
tuple of them. Its annotations say the form in which it wants them; a parameter that it does not
have, or a constant that it does not accept, makes a package that uses it refused when it is opened.

All arithmetic is float32, or the integers' own; a function need not bring its result to the type
that the program declares, and must not round: whoever calls it does both. It must keep the rule of
this folder: what it computes for a token's row does not depend on the other rows (`products.py`,
`reductions.py` and `elementwise.py` say how).
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
    """Holds the array of one state."""

    array: Array


Macs = Callable[[Mapping[str, Any], Array], int]
"""Multiply-accumulates of one call, from its arguments and its (first) output."""


Refuses = Callable[[Mapping[str, Any]], str | None]
"""What is not accepted of constants that go together, from the arguments that are constant."""


class Entry(NamedTuple):
    """An operation that can be run."""

    run: Callable[..., Any]
    forms: Mapping[str, Callable[[Any], Any] | None]
    """By parameter: what brings an array, or a text, into the form that `run` wants."""
    required: frozenset[str]
    accepts: Mapping[str, frozenset[Any]]
    """By parameter: the only constants that it may be."""
    moves: bool
    """It only passes numbers on, so that there is nothing to round."""
    macs: Macs | None
    several: frozenset[str]
    """Parameters that take any number of operands."""
    refuses: Refuses | None


_Run = TypeVar("_Run", bound=Callable[..., Any])
_NEEDED = inspect.Parameter.empty

OPS: dict[str, Entry] = {}
"""Every operation that is known, by MIL's name for it."""


def op(
    *names: str,
    moves: bool = False,
    macs: Macs | None = None,
    refuses: Refuses | None = None,
    **accepts: tuple[Any, ...],
) -> Callable[[_Run], _Run]:
    """Enter a function under these names; `accepts` lists the only constants of a parameter."""

    def enter(run: _Run) -> _Run:
        parameters = inspect.signature(run).parameters
        entry = Entry(
            run,
            {name: _form(parameter.annotation) for name, parameter in parameters.items()},
            frozenset(
                name for name, parameter in parameters.items() if parameter.default is _NEEDED
            ),
            {name: frozenset(values) for name, values in accepts.items()},
            moves,
            macs,
            frozenset(
                name for name, parameter in parameters.items() if parameter.annotation == Arrays
            ),
            refuses,
        )
        OPS.update(dict.fromkeys(names, entry))
        return run

    return enter


def _form(annotation: Any) -> Callable[[Any], Any] | None:
    """What brings a value into the form of an annotation; None: it is in it already."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    optional = isinstance(annotation, UnionType) and len(kinds) == 1
    return _FORMS[kinds[0] if optional else annotation]


def _ints(value: Array) -> Ints:
    return tuple(int(one) for one in np.ravel(value).tolist())


def _bools(value: Array) -> Bools:
    return tuple(bool(one) for one in np.ravel(value).tolist())


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
