"""Calls of functions in an answer, and in the chat before it.

Knows the form that `paceline.constraints.tool_calls` reads, and how to describe it to a model whose
template does not. The rule: text that may still turn out to be a call is not sent.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from paceline.constraints.tool_calls import CLOSE, OPEN, ToolCall, parse_tool_calls
from paceline.models.thinking import Thinking
from paceline.server.api.bodies import Message, Tool

_HOW = f"""You may call functions to help with the user's request. These are the functions:
<tools>
{{}}
</tools>
To call one, answer with its name and its arguments as JSON:
{OPEN}
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
{CLOSE}"""


_SPELT_OUT = ("tool_calls", "tool_call_id", "name")
"""What a template that knows nothing of functions gets as text, or not at all."""


class Told:
    """What of an answer can be told while it comes."""

    def __init__(self) -> None:
        """Nothing has come."""
        self._text = ""
        self._told = 0

    def push(self, text: str) -> str:
        """More text; what of it is no call for certain."""
        self._text += text
        found = self._text.find(OPEN)
        safe = found if found >= 0 else len(self._text) - _begun(self._text)
        end = len(self._text[:safe].rstrip())
        new = self._text[self._told : end]
        self._told = max(self._told, end)
        return new

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """The rest of the text, and the calls."""
        parsed = parse_tool_calls(self._text)
        if not parsed.calls:
            return self._text[self._told :], ()
        said = self._text[: self._told].lstrip()
        return parsed.content.removeprefix(said), parsed.calls


def _begun(text: str) -> int:
    """How much of a mark the text ends with."""
    return next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)


def written(calls: Sequence[ToolCall], *, indexed: bool = False) -> list[dict[str, Any]]:
    """Calls as OpenAI has them; with their places, for a stream."""
    return [
        {
            **({"index": index} if indexed else {}),
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


def turns(messages: Sequence[Message], thinking: Thinking) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: arguments are objects, developers are the system.

    `thinking` says under which names the template reads the thoughts of earlier answers.
    """
    found = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": message.content or ""}
        turn |= thinking.remembered(message.reasoning_content)
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            turn["tool_calls"] = [
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
        found.append(turn)
    return found


def spelt_out(chat: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """A chat with functions for a template that knows nothing of them: all of it as text."""
    found: list[dict[str, Any]] = []
    for turn in chat:
        content, role = turn["content"], turn["role"]
        for call in turn.get("tool_calls", ()):
            text = json.dumps(call["function"], ensure_ascii=False)
            content += f"{chr(10) if content else ''}{OPEN}\n{text}\n{CLOSE}"
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        kept = {name: each for name, each in turn.items() if name not in _SPELT_OUT}
        found.append({**kept, "role": role, "content": content})
    if not tools:
        return found
    about = "\n".join(tool.model_dump_json(exclude_none=True) for tool in tools)
    how = _HOW.replace("{}", about, 1)
    if found[0]["role"] == "system":
        found[0]["content"] += f"\n\n{how}"
        return found
    return [{"role": "system", "content": how}, *found]


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
