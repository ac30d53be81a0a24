"""Functions in OpenAI's form: those that an answer may call, the choice among them, and calls.

Independent of a model, and of how it writes a call.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.server.json_body import Body


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
        """Its type and name."""
        return f"{self.type} {self.name or ''}".strip()[:80]


class NamedTool(Body):
    """The one function that the answer must call."""

    class Name(Body):
        """Its name."""

        name: str

    type: Literal["function"]
    function: Name


class AllowedTools(Body):
    """The functions that the answer may call."""

    class Allowed(Body):
        """Their names, and whether the answer must call one."""

        mode: Literal["auto", "required"]
        tools: list[NamedTool]

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class CalledFunction(Body):
    """A function call of an earlier answer."""

    name: str
    arguments: str = "{}"


class Called(Body):
    """OpenAI's wrapper of a function call."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


def called(call_id: str | None, name: str, arguments: str) -> Called:
    return Called(id=call_id, function=CalledFunction(name=name, arguments=arguments))
