"""The bodies of Anthropic's API, and their conversion to chats.

Independent of the model. Invariant: unknown fields are ignored (`cache_control`, `metadata`), and
`Reader` replaces content blocks of unknown types.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceline.errors import InvalidRequest
from paceline.models import Thinking
from paceline.server.body import (
    MAX_MESSAGES,
    ChatBody,
    GenerationBody,
    Message,
    NamedSchema,
    OneAnswer,
    ResponseFormat,
)
from paceline.server.errors import field_error
from paceline.server.json_body import (
    Body,
    Function,
    NamedTool,
    OneOf,
    OtherTool,
    Text,
    Tool,
    or_text,
    tool_call,
)

_BILLING = "x-anthropic-billing-header:"
"""Begins a block that Claude Code sends for the API, not for the model. The block differs in each
request, so with it no prompt would have a prefix in the cache."""

_EFFORTS = {"max": "xhigh"}
"""Anthropic's efforts with different names in OpenAI's API."""


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Thoughts of an earlier answer."""

    type: Literal["thinking"]
    thinking: str = ""


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = Field(default={})
    """An object, or the text of one that was cut."""


class ToolResultBlock(Body):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""
    is_error: bool = False


Block = Annotated[Any, OneOf(TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock)]


def _without_billing(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [
        block
        for block in value
        if not (isinstance(block, dict) and str(block.get("text")).startswith(_BILLING))
    ]


class Turn(Body):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block], or_text(list[Block], lambda text: {"type": "text", "text": text})
    ]


class ToolDefinition(Body):
    """A tool that the client runs."""

    type: Literal["", "custom"] = ""
    name: str = Field(min_length=1)
    description: str = ""
    input_schema: dict[str, Any] = Field(default={})


class ToolChoice(Body):
    """Controls whether the response may or must use a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOptions(Body):
    """Turns reasoning on or off."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(Body):
    """The structure of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputOptions(Body):
    """Options of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesBody(GenerationBody):
    """POST /v1/messages."""

    blocks: ClassVar[bool] = True

    n: OneAnswer = 1
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Annotated[
        Text, BeforeValidator(_without_billing, json_schema_input_type=str | list[Any])
    ] = ""
    max_tokens: int | None = Field(default=None, ge=0)
    stop_sequences: list[str] = Field(default=[], max_length=16)
    thinking: ThinkingOptions | None = None
    tools: list[Annotated[Any, OneOf(ToolDefinition, OtherTool)]] = Field(default=[])
    tool_choice: ToolChoice = ToolChoice(type="auto")
    output_config: OutputOptions = OutputOptions()
    output_format: OutputFormat | None = None
    """The older field of `output_config.format`."""

    @model_validator(mode="after")
    def _consistent(self) -> "MessagesBody":
        if self.tool_choice.type == "tool" and self.tool_choice.name is None:
            raise field_error("tool_choice.name", "is missing")
        self.stop = [*self.stop, *self.stop_sequences]
        if (form := self.output_config.format or self.output_format) is not None:
            schema = NamedSchema(schema=form.schema_)
            self.response_format = ResponseFormat(type="json_schema", json_schema=schema)
        return self

    @property
    def ignored_tools(self) -> list[str]:
        return [tool.about for tool in self.tools if isinstance(tool, OtherTool)]

    @property
    def returns_thoughts(self) -> bool:
        """True if reasoning is part of the answer."""
        return self.thinking is None or self.thinking.type != "disabled"

    def chat(self, thinking: Thinking) -> ChatBody:
        """Return the equivalent chat body.

        Raises ApiError if a tool result has no call before it.
        """
        choice = self.tool_choice
        named = NamedTool.Name(name=choice.name or "")
        effort = self.output_config.effort if self.returns_thoughts else None
        choices: dict[str, Any] = {
            "any": "required",
            "tool": NamedTool(type="function", function=named),
        }
        return self.as_chat(
            messages=self._chat_messages(),
            max_tokens=self.max_tokens,
            tools=self._tools,
            tool_choice=choices.get(choice.type, choice.type),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            chat_template_kwargs=self._variables(thinking),
            reasoning_effort=effort and _EFFORTS.get(effort, effort),
            include_reasoning=self.returns_thoughts,
        )

    @property
    def _tools(self) -> list[Tool]:
        return [
            Tool(
                type="function",
                function=Function(
                    name=tool.name, description=tool.description, parameters=tool.input_schema
                ),
            )
            for tool in self.tools
            if isinstance(tool, ToolDefinition)
        ]

    def _variables(self, thinking: Thinking) -> dict[str, Any]:
        """Return template variables for reasoning, as far as the model supports it.

        Clients send `thinking` without knowing the model, so unsupported settings are omitted;
        reasoning that cannot be turned off is not returned.
        """
        if not self.returns_thoughts:
            try:
                return thinking.switch(False)
            except InvalidRequest:
                return {}
        has_switch = self.thinking is not None and thinking.form is not None
        return thinking.switch(True) if has_switch else {}

    def _chat_messages(self) -> list[Message]:
        system = Message(role="system", content=self.system, place="system")
        messages = [system] if self.system else []
        calls = set[str]()
        for place, turn in enumerate(self.messages):
            for number, block in enumerate(turn.content):
                where = f"messages[{place}].content[{number}]"
                if isinstance(block, ToolUseBlock):
                    if turn.role != "assistant":
                        raise field_error(where, "only the assistant calls a tool")
                    calls.add(block.id)
                if isinstance(block, ToolResultBlock) and block.tool_use_id not in calls:
                    raise field_error(
                        f"{where}.tool_use_id",
                        f"tool_use {block.tool_use_id[:80]!r} not found before its result",
                    )
            runs = groupby(turn.content, lambda block: isinstance(block, ToolResultBlock))
            for is_result, run in runs:
                messages += map(_result, run) if is_result else [_message(turn.role, [*run])]
            if not turn.content:
                messages.append(_message(turn.role, []))
            for message in messages:
                message.place = message.place or f"messages[{place}]"
        return messages


def _result(block: Any) -> Message:
    text = block.content or ("error" if block.is_error else "")
    return Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _message(role: Literal["user", "assistant", "system"], blocks: Sequence[Any]) -> Message:
    calls = [
        tool_call(block.id, block.name, _json(block.input))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return Message(
        role=role,
        content="\n".join(block.text for block in blocks if isinstance(block, TextBlock)),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
