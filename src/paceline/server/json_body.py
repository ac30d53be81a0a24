"""JSON bodies: the parser, and parts that many bodies share, such as functions.

Invariants: an unknown field is ignored, `null` means absent, 5.0 is 5, and an error for an invalid
value names its field.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema, from_json

from paceline.errors import InvalidRequest
from paceline.models import check_unicode
from paceline.runtime.prompt import text_of
from paceline.server.errors import ApiError


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {name: _to_int(value) for name, value in data.items() if value is not None}
        return data


def _to_int(value: Any) -> Any:
    """Return 5 for 5.0: they are the same number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class OneOf:
    """Annotates a union of bodies by their field `type`.

    A body without that field has the type of its name, or none; one with any text has the others.
    Errors name the tags, which are the names of classes; `_path` omits them.
    """

    def __init__(self, *kinds: type[Body]) -> None:
        self._kinds, self._other = {kind.__name__: kind for kind in kinds}, None
        self._names: dict[str, str] = {}
        for name, kind in self._kinds.items():
            field = kind.model_fields.get("type")
            fixed = get_args(field.annotation) if field else ("", name.lower())
            self._names |= dict.fromkeys(fixed, name)
            self._other = self._other if fixed else name

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.tagged_union_schema(
            {name: handler.generate_schema(kind) for name, kind in self._kinds.items()},
            self._tag,
            custom_error_type="invalid",
            custom_error_message="expected an object with a type",
        )

    def _tag(self, value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return self._names.get("" if kind is None else str(kind), self._other)


def invalid(message: str) -> PydanticCustomError:
    """Return an error for a validator to raise; its message follows the field's name."""
    return PydanticCustomError("invalid", message)


def or_text(kind: Any, item: Callable[[str], Any]) -> BeforeValidator:
    """Accept a text for a list of type `kind`: `item` returns its one item."""
    return BeforeValidator(
        lambda value: [item(value)] if isinstance(value, str) else value,
        json_schema_input_type=str | kind,
    )


def _joined(value: Any) -> Any:
    """Return the text of a list of parts."""
    try:
        return text_of(value) if isinstance(value, list) else value
    except InvalidRequest as error:
        raise invalid(str(error)) from None


def _prompts(value: Any) -> Any:
    ids = isinstance(value, list) and value and all(type(token) is int for token in value)
    return [value] if isinstance(value, str) or ids else value


Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]
"""One or several prompts, each a text or token ids."""


Text = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[Any])]

_MARKS = {
    b"\x1f\x8b": "it is compressed by gzip; send it as it is",
    b"\xef\xbb\xbf": "it begins with a byte order mark; send UTF-8 without one",
    b"\xff\xfe": "it is UTF-16; send UTF-8",
    b"\xfe\xff": "it is UTF-16; send UTF-8",
}
"""First bytes of a body that is not JSON -> the reason in the error."""

_Parsed = TypeVar("_Parsed", bound=Body)


def parse(kind: type[_Parsed], body: bytes) -> _Parsed:
    """Parse the body of a request. Raises ApiError, as `validate` does, or if it is not JSON."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        with suppress(ValueError, RecursionError):  # Python's parser allows the values named there
            _check_unicode(json.loads(body.decode("utf-8", "surrogatepass")))
        reason = next((what for mark, what in _MARKS.items() if body.startswith(mark)), error)
        raise ApiError(f"the body is not valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError("the body should be a JSON object", code="invalid_json")
    return validate(kind, data)


def validate(kind: type[_Parsed], data: dict[str, Any]) -> _Parsed:
    """Return a body from its JSON. Raises ApiError, which names the first invalid value."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = _path(data, fault["loc"])
        what = "is missing" if fault["type"] == "missing" else fault["msg"]
        message = f"{where}{what if what[:1] in ':[' else f': {what}'}"
        raise ApiError(message, param=message.partition(": ")[0]) from None


def _check_unicode(value: Any, path: str = "") -> None:
    """Raise ApiError, which names the field, for half of a surrogate pair in a JSON value."""
    if isinstance(value, str):
        try:
            check_unicode(path or "the body", value)
        except InvalidRequest as error:
            raise ApiError(str(error), param=path or None, code="invalid_json") from None
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_unicode(key, path)
            _check_unicode(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            _check_unicode(inner, f"{path}[{place}]")


def _path(data: Any, steps: tuple[int | str, ...]) -> str:
    """Return a path, such as `messages[0].content`, without pydantic's names of union members."""
    path = ""
    for step in steps:
        if isinstance(step, int):
            path += f"[{step}]"
            data = data[step] if isinstance(data, list) and step < len(data) else None
        elif isinstance(data, dict) and (step in data or step.islower()):
            path += f".{step}" if path else step
            data = data.get(step)
    return path


def _declared(value: Any) -> Any:
    """Return a function's parameters as a schema that chat templates can read: null is absent."""
    if not isinstance(value, Mapping):
        return value
    schema = {"type": "object", **{key: part for key, part in value.items() if part is not None}}
    properties = schema.setdefault("properties", {})
    if isinstance(properties, Mapping):
        schema["properties"] = {name: part for name, part in properties.items() if part is not None}
    return schema


Parameters = Annotated[dict[str, Any], BeforeValidator(_declared)]
"""JSON schema of a function's arguments."""


class Function(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str = ""
    """Never absent: some chat templates require it."""
    parameters: Parameters = Field(default={}, validate_default=True)


class Tool(Body):
    """OpenAI's wrapper of a function."""

    type: Literal["function"]
    function: Function


class OtherTool(Body):
    """A tool that the server would have to run, or whose calls are not JSON: it is left out."""

    type: str
    name: Any = None

    @property
    def about(self) -> str:
        """The tool's type and name."""
        return f"{self.type} {self.name or ''}".strip()[:80]


class NamedTool(Body):
    """The one function that the answer must call."""

    class Name(Body):
        """The function's name."""

        name: str

    type: Literal["function"]
    function: Name


class AllowedTools(Body):
    """The functions that the answer may call."""

    class Allowed(Body):
        """The allowed functions, and whether the response must call one."""

        mode: Literal["auto", "required"]
        tools: list[NamedTool]

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class CalledFunction(Body):
    """A function call of an earlier answer."""

    name: str
    arguments: str = "{}"


class FunctionCall(Body):
    """OpenAI's wrapper of a function call."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


def tool_call(call_id: str | None, name: str, arguments: str) -> FunctionCall:
    return FunctionCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))
