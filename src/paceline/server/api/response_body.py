"""The body of POST /v1/responses, and its conversion to a chat."""

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.server.api.response_items import Item, OfferedTools, ResponseTool, ToolChoice
from paceline.server.body import (
    MAX_MESSAGES,
    ChatBody,
    Effort,
    GenerationBody,
    Logprobs,
    Message,
    NamedSchema,
    OneAnswer,
    ResponseFormat,
)
from paceline.server.errors import ApiError, field_error
from paceline.server.json_body import Body, NamedTool, Tool, or_text

LOGPROBS = "message.output_text.logprobs"
"""Value in `include` that requests the logprobs of the text."""


CALLABLE = ("function", "custom", "namespace")
"""Types of tools that the client runs."""


class Format(Body):
    """The structure of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(Body):
    """Options of the text."""

    format: Format = Format()


InputItems = Annotated[
    list[Item],
    or_text(list[Item], lambda text: {"role": "user", "content": text}),
    Field(min_length=1, max_length=MAX_MESSAGES),
]


class Reasoning(Body):
    """Options of the model's thoughts."""

    effort: Effort | None = None


class ResponsesBody(GenerationBody):
    """POST /v1/responses."""

    n: OneAnswer = 1
    input: InputItems
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=-1)
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    include: list[str] = Field(default=[])
    top_logprobs: Logprobs = 0
    metadata: dict[str, str] = Field(default={})
    tools: list[ResponseTool] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    store: bool = True
    conversation: Any = None
    background: bool = False
    prompt: Any = None
    truncation: Literal["disabled", "auto"] = "disabled"

    @model_validator(mode="after")
    def _consistent(self) -> "ResponsesBody":
        for name, is_set, instead in (
            ("conversation", self.conversation, "use previous_response_id"),
            ("background", self.background, "wait for the answer, or stream it"),
            ("prompt", isinstance(self.prompt, dict), "send instructions and input"),
            ("truncation", self.truncation == "auto", "shorten the input"),
        ):
            if is_set:
                raise ApiError(f"{name} is not supported; {instead}", param=name)
        if self.top_logprobs and LOGPROBS not in self.include:
            raise ApiError(f"top_logprobs requires {LOGPROBS} in include", param="top_logprobs")
        form = self.text.format
        if form.type == "json_schema" and form.schema_ is None:
            raise field_error("text.format.schema", "is missing")
        if form.type != "text":
            named = NamedSchema(schema=form.schema_) if form.schema_ is not None else None
            self.response_format = ResponseFormat(type=form.type, json_schema=named)
        return self

    @cached_property
    def offered(self) -> OfferedTools:
        """The tools as the model receives them."""
        return OfferedTools(self.tools)

    @property
    def ignored_tools(self) -> list[str]:
        return self.offered.ignored

    @property
    def functions(self) -> list[Tool]:
        """The functions that the model may call. Raises ApiError if a named one is missing."""
        choice, names = self.tool_choice, list(self.offered.functions)
        if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
            listed = [tool for tool in choice.tools if tool.type in CALLABLE]
            allowed = {name for tool in listed for name in self.offered.chosen(tool)}
            names = [name for name in names if name in allowed]
        return self.offered.for_chat(names)

    @property
    def chat_choice(self) -> Literal["none", "auto", "required"] | NamedTool:
        """The tool choice of the chat. Raises ApiError for a tool that the server would run."""
        choice = self.tool_choice
        if not isinstance(choice, ToolChoice):
            return choice
        if choice.type == "allowed_tools":
            return choice.mode
        if choice.type not in ("function", "custom") or choice.name is None:
            raise ApiError("expected a function with its name", param="tool_choice")
        (name,) = self.offered.chosen(choice)
        return NamedTool(type="function", function=NamedTool.Name(name=name))

    def chat(self, messages: list[Message]) -> ChatBody:
        if self.instructions:
            messages = [
                Message(role="system", content=self.instructions, place="instructions"),
                *messages,
            ]
        logprobs = LOGPROBS in self.include
        return self.as_chat(
            messages=messages,
            max_tokens=self.max_output_tokens,
            logprobs=logprobs,
            top_logprobs=self.top_logprobs if logprobs else None,
            tools=self.functions,
            tool_choice=self.chat_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort,
        )
