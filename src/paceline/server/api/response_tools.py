"""The tools of /v1/responses: functions, custom tools, those in namespaces, and others.

Independent of the model, which calls each function by one name. Invariant: these names are unique.
In the API, a call, a choice and an earlier call of a function in a namespace all have both `name`
and `namespace`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag
from pydantic_core import from_json

from paceline.server.errors import ApiError
from paceline.server.json_body import Body, Function, OtherTool, Tool

_SHOWN_CHARACTERS = 80


_INPUT = "input"
_TEXT = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
"""The parameters of a custom tool."""


class FunctionTool(Function):
    """A function that the model may call, or a custom tool: for the model one with a string."""

    type: Literal["function", "custom"]
    format: dict[str, Any] | None = None
    """The grammar of a custom tool's input."""


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool, from the arguments of its call so far."""
    try:
        return str(from_json(arguments or "{}", allow_partial="trailing-strings").get(_INPUT, ""))
    except ValueError:  # half a surrogate pair
        return ""


def _tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _TAGS.get(str(kind), "OtherTool")


_TAGS = {"function": "FunctionTool", "custom": "FunctionTool", "namespace": "NamespaceTool"}


class NamespaceTool(Body):
    """Functions of one source, as Codex sends those of an MCP server."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str = ""
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[OtherTool, Tag("OtherTool")],
            Discriminator(lambda value: _tag(value).replace("NamespaceTool", "OtherTool")),
        ]
    ] = Field(default=[])


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")]
    | Annotated[NamespaceTool, Tag("NamespaceTool")]
    | Annotated[OtherTool, Tag("OtherTool")],
    Discriminator(_tag),
]


class ToolChoice(Body):
    """A function that the answer must call, or the functions that it may call."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: "list[ToolChoice]" = Field(default=[])


class Place(NamedTuple):
    """The place of a function in the API."""

    namespace: str | None
    name: str
    custom: bool = False
    """True for a custom tool."""


class OfferedTools:
    """The tools of a request as the model receives them."""

    def __init__(self, tools: Sequence[FunctionTool | NamespaceTool | OtherTool]) -> None:
        self.functions: dict[str, FunctionTool] = {}
        """The functions by the model's names."""
        self._places: dict[str, Place] = {}
        self.ignored: list[str] = []
        """Types and names of the ignored tools."""
        # Functions without a namespace come first: they keep their names.
        for tool in sorted(tools, key=lambda tool: isinstance(tool, NamespaceTool)):
            if not isinstance(tool, NamespaceTool):
                self._add(tool, None)
                continue
            about = tool.description  # once: it may be long
            for inner in tool.tools:
                self._add(inner, tool.name, about)
                about = about if isinstance(inner, OtherTool) else ""

    def _add(self, tool: FunctionTool | OtherTool, namespace: str | None, about: str = "") -> None:
        if isinstance(tool, OtherTool):
            of = f" of {namespace[:_SHOWN_CHARACTERS]}" if namespace else ""
            self.ignored.append(tool.about + of)
            return
        place = Place(namespace, tool.name, tool.type == "custom")
        name = self.name_of(place)
        while self._places.get(name, place) != place:
            name += "_"
        self._places[name] = place
        grammar = (tool.format or {}).get("definition") if place.custom else None
        lines = (about, tool.description, grammar and f"The input has this grammar:\n{grammar}")
        more = {"parameters": _TEXT} if place.custom else {}
        text = "\n".join(filter(None, lines))
        self.functions[name] = tool.model_copy(update={"name": name, "description": text, **more})

    def for_chat(self, names: Sequence[str]) -> list[Tool]:
        """Return functions in the format of a chat body."""
        return [
            Tool(type="function", function=Function(**tool.model_dump(exclude={"type", "format"})))
            for tool in (self.functions[name] for name in names)
        ]

    def name_of(self, place: Place) -> str:
        """Return the model's name of a function, which may no longer be offered."""
        for name, other in self._places.items():
            if other[:2] == place[:2]:
                return name
        return place.name if not place.namespace else f"{place.namespace.rstrip('_')}__{place.name}"

    def place_of(self, name: str) -> Place:
        """Return the place of the function that the model called."""
        return self._places.get(name, Place(None, name))

    def chosen(self, choice: ToolChoice) -> list[str]:
        """Return the functions that a choice names, where an unambiguous name suffices.

        Raises ApiError if there are none.
        """
        if choice.type == "namespace":
            return [name for name, place in self._places.items() if place.namespace == choice.name]
        names = [name for name, place in self._places.items() if place.name == choice.name]
        exact = [name for name in names if self._places[name].namespace == choice.namespace]
        if exact or (choice.namespace is None and len(names) == 1):
            return exact or names
        about = "/".join(filter(None, (choice.namespace, choice.name)))[:_SHOWN_CHARACTERS]
        raise ApiError(f"{about!r} is not a function in tools", param="tool_choice")
