"""Validates parsed JSON against a dataclass: every fault at once, a line per fault.

pydantic does the work; it is imported with the first validation, because it takes a tenth of a
second that `paceline --help` need not wait for.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from paceline.errors import InvalidRequest, PacelineError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_T = TypeVar("_T")

_SHOWN = 60
"""Characters of a wrong value that a message shows."""


class Limit:
    """Metadata of `Annotated`: limits of pydantic's core schema, such as `ge` or `min_length`.

    Unlike `pydantic.Field`, it needs no import of pydantic.
    """

    def __init__(self, **limits: int) -> None:
        self._limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Return the schema of the annotated type with the limits added."""
        return {**handler(source), **self._limits}


Count = Annotated[int, Limit(ge=0)]
Positive = Annotated[int, Limit(ge=1)]


def validated(
    kind: type[_T], value: object, name: str, *, error: type[PacelineError] = InvalidRequest
) -> _T:
    """Return `value`, parsed JSON, as a `kind`: a dataclass, or any type that pydantic validates.

    Types are strict: "1" is not accepted as a number. Fields that `kind` lacks are ignored.

    Args:
        kind: the type to return.
        value: parsed JSON.
        name: the file or option, for the message.
        error: the type of error to raise.

    Raises:
        PacelineError: of the type `error`; its message has one line per fault.
    """
    from pydantic import ValidationError
    from pydantic_core import PydanticSerializationError, to_json

    adapter: TypeAdapter[_T] = _adapter(kind)  # type: ignore[arg-type]
    try:
        return adapter.validate_json(to_json(value), strict=True)
    except ValidationError as failure:
        faults = [_fault(details) for details in failure.errors(include_url=False)]
    except PydanticSerializationError as failure:  # half a surrogate pair, which JSON may escape
        faults = [str(failure)]
    raise error(list_faults(name, faults))


def list_faults(name: str, faults: Sequence[str]) -> str:
    """One message for all faults of `name`, a line per fault."""
    if len(faults) == 1:
        return f"{name}: {faults[0]}"
    return "\n".join([f"{name} has {len(faults)} faults:", *(f"  {fault}" for fault in faults)])


@cache
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter
    from pydantic_core import SchemaError

    try:
        return TypeAdapter(kind)
    except SchemaError as error:
        if KeyboardInterrupt.__name__ in str(error):  # what Ctrl-C becomes while one is built
            raise KeyboardInterrupt from None
        raise


def _fault(details: Any) -> str:
    """Return one fault as `a.b.0: Input should be a valid integer, not 'x'`."""
    place = ".".join(str(part) for part in details["loc"])
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] not in ("missing", "value_error"):
        message += f", not {repr(details['input'])[:_SHOWN]}"
    return f"{place}: {message}" if place else message
