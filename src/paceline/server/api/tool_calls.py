"""Tool calls in an answer and in the chat before it, in the form of `constraints.tool_calls`.

Invariant: text that may still become a tool call is not sent.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from paceline.constraints.tool_calls import CLOSE, OPEN, ToolCall, parse_tool_calls
from paceline.decoding.text import overlap
from paceline.models.thinking import Thinking
from paceline.server.api.schema import Message, Tool

_INSTRUCTIONS = f"""You may call functions to help with the user's request. These are the functions:
<tools>
{{}}
</tools>
To call one, answer with its name and its arguments as JSON:
{OPEN}
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
{CLOSE}"""


_TOOL_FIELDS = ("tool_calls", "tool_call_id", "name")
"""Fields of a message that a template without tools does not support."""


class ToolCallStream:
    """Splits the text of an answer, as it grows, into content and tool calls."""

    def __init__(self) -> None:
        """Start with no text."""
        self._text = ""
        self._sent = 0

    def push(self, text: str) -> str:
        """Add text; returns the new content, which is certainly not part of a call."""
        self._text += text
        found = self._text.find(OPEN)
        safe = found if found >= 0 else len(self._text) - overlap(self._text, OPEN)
        end = len(self._text[:safe].rstrip())
        new = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return new

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """The rest of the content, and the calls."""
        parsed = parse_tool_calls(self._text)
        if not parsed.calls:
            return self._text[self._sent :], ()
        sent = self._text[: self._sent].lstrip()
        return parsed.content.removeprefix(sent), parsed.calls


def openai_calls(calls: Sequence[ToolCall], *, indexed: bool = False) -> list[dict[str, Any]]:
    """Calls in OpenAI's form; with their indices for a stream."""
    return [
        {
            **({"index": index} if indexed else {}),
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


def template_messages(messages: Sequence[Message], thinking: Thinking) -> list[dict[str, Any]]:
    """Messages for a chat template: parsed arguments, and `developer` becomes `system`.

    `thinking` has the names under which the template expects the thoughts of earlier answers.
    """
    found = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        made: dict[str, Any] = {"role": role, "content": message.content or ""}
        made |= thinking.message_fields(message.reasoning_content)
        if message.name is not None:
            made["name"] = message.name
        if message.tool_call_id is not None:
            made["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        found.append(made)
    return found


def describe_tools(chat: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """A chat with its tools and calls as plain text, for a template that does not support tools."""
    found: list[dict[str, Any]] = []
    for message in chat:
        content, role = message["content"], message["role"]
        for call in message.get("tool_calls", ()):
            text = json.dumps(call["function"], ensure_ascii=False)
            content += f"{chr(10) if content else ''}{OPEN}\n{text}\n{CLOSE}"
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        kept = {name: each for name, each in message.items() if name not in _TOOL_FIELDS}
        found.append({**kept, "role": role, "content": content})
    if not tools:
        return found
    listed = "\n".join(tool.model_dump_json(exclude_none=True) for tool in tools)
    instructions = _INSTRUCTIONS.replace("{}", listed, 1)
    if found[0]["role"] == "system":
        found[0]["content"] += f"\n\n{instructions}"
        return found
    return [{"role": "system", "content": instructions}, *found]


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
