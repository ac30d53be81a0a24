"""Old public names: they still work, with a DeprecationWarning that has the new name."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _warn(old: str, new: str) -> None:
    warnings.warn(f"`{old}` is now `{new}`", DeprecationWarning, stacklevel=3)


def renamed(old: str, function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the function, for its old name."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        _warn(old, function.__name__)
        return function(*args, **kwargs)

    call.__doc__ = f"Old name of `{function.__name__}`."
    return call


def accept_renamed(**names: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorate a function to accept keywords by their old names too: old name -> new name."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for old in names.keys() & kwargs.keys():
                if names[old] in kwargs:
                    raise TypeError(f"{old} is the old name of {names[old]}; give one of them")
                _warn(old, names[old])
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
