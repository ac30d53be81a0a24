"""Tool calls in an answer and in the chat before it, between OpenAI's form and the model's.

`constraints/tool_calls.py` splits an answer.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.constraints.call_form import ToolForm
from paceline.constraints.tool_calls import CallPiece, ToolCall, written_calls
from paceline.constraints.tool_forms import HERMES, KIMI
from paceline.models import Thinking
from paceline.server.api.errors import ApiError
from paceline.server.api.schema import Message, Tool

_INSTRUCTIONS = """You may call functions to help with the user's request. These are the functions:
<tools>
{}
</tools>
To call one, answer with its name and its arguments as JSON:
"""
_EXAMPLE = ToolCall("the function's name", '{"the argument\'s name": "its value"}')

_TOOL_FIELDS = ("tool_calls", "tool_call_id", "name")
"""Fields of a message that a template without tools does not support."""

_TOOL_ROLE = re.compile(r"""role['"\])\s]*(==|!=|in)[^%}]*?['"]tool['"]""")
"""In templates that know messages of the role `tool`."""


def function_schemas(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """A function's name -> the JSON schema of its arguments."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def call_id(form: ToolForm | None) -> str:
    """A new id of a call, as the model's chat template demands."""
    length = form.id_length if form else None
    return secrets.token_hex(length)[:length] if length else f"call_{secrets.token_hex(12)}"


def openai_calls(calls: Sequence[ToolCall], form: ToolForm | None) -> list[dict[str, Any]]:
    """Calls in OpenAI's form."""
    return [
        {
            "id": call_id(form),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def openai_delta(piece: CallPiece, form: ToolForm | None) -> dict[str, Any]:
    """A part of a call in the form of OpenAI's stream; only the first has the name and an id."""
    function = {"arguments": piece.arguments}
    if not piece.name:
        return {"index": piece.call, "function": function}
    function = {"name": piece.name, **function}
    return {"index": piece.call, "id": call_id(form), "type": "function", "function": function}


def template_messages(messages: Sequence[Message], thinking: Thinking) -> list[dict[str, Any]]:
    """Messages for a chat template: parsed arguments, and `developer` becomes `system`.

    `thinking` has the names under which the template expects the thoughts of earlier answers.
    Raises ApiError for a tool's result without its call.
    """
    found = []
    called: set[str | None] = set()
    for place, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls or ()}
        if message.role == "tool" and not {None, message.tool_call_id} & called:
            raise ApiError(
                f"messages[{place}]: the result of a tool without its call; expected the "
                "tool_call_id of a call in an earlier message of the assistant",
                param=f"messages[{place}].tool_call_id",
            )
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


def fit_calls(
    chat: Sequence[dict[str, Any]], form: ToolForm | None, template: str
) -> list[dict[str, Any]]:
    """A chat with its calls and their results as a template that supports tools expects them."""
    found = [dict(message) for message in chat]
    if form and form.name == KIMI.name:
        _name_ids(found)
    if form and form.id_length:
        for message in found:
            if message.get("tool_call_id"):
                message["tool_call_id"] = _short_id(message["tool_call_id"], form.id_length)
            for call in message.get("tool_calls", ()):
                call["id"] = _short_id(call["id"] or "", form.id_length)
    if form and "tool_calls" not in template:
        for message in found:
            calls = [
                ToolCall(
                    call["function"]["name"],
                    json.dumps(call["function"]["arguments"], ensure_ascii=False),
                )
                for call in message.pop("tool_calls", ())
            ]
            with suppress(ValueError):  # arguments that are no object
                message["content"] += written_calls(form, calls) if calls else ""
    if form and form.channels:
        for message in found:  # beside calls the template takes thoughts or content, not both
            thoughts, content = message.get("thinking"), message.get("content")
            if thoughts and content and message.get("tool_calls"):
                message |= {"thinking": f"{thoughts}\n\n{content}", "content": ""}
    if "tool_responses" in template and not _TOOL_ROLE.search(template):
        return _with_responses(found)
    return found


def _name_ids(chat: Sequence[dict[str, Any]]) -> None:
    """Give calls the ids by which Kimi's template names them, and their results the same."""
    ids: dict[str | None, str] = {}
    for message in chat:
        for place, call in enumerate(message.get("tool_calls", ())):
            ids[call["id"]] = call["id"] = f"functions.{call['function']['name']}:{place}"
        if message.get("tool_call_id") in ids:
            message["tool_call_id"] = ids[message["tool_call_id"]]


def _short_id(text: str, length: int) -> str:
    """An id of letters and digits; the same for the same text."""
    if len(text) == length and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:length]


def _with_responses(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat with results in the message that called, as Gemma 4's templates read them."""
    found: list[dict[str, Any]] = []
    names: dict[str | None, str] = {}
    for message in chat:
        calls = message.get("tool_calls", ())
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if message["role"] == "tool" and found and found[-1].get("tool_calls"):
            name = names.get(message.get("tool_call_id"), "unknown")
            response = {"name": name, "response": message["content"]}
            found[-1].setdefault("tool_responses", []).append(response)
        else:
            found.append(dict(message))
    return found


def describe_tools(
    chat: Sequence[dict[str, Any]], tools: Sequence[str], form: ToolForm = HERMES
) -> list[dict[str, Any]]:
    """A chat with its tools as plain text, for a template that does not support tools.

    `tools` are their JSON texts. With the form `HERMES` calls and results are text, too; templates
    of another form have them.
    """
    found = [dict(message) for message in chat]
    if form.name == HERMES.name:
        found = [_as_text(message) for message in chat]
    if not tools:
        return found
    instructions = _INSTRUCTIONS.replace("{}", "\n".join(tools), 1) + written_calls(
        form, [_EXAMPLE]
    )
    if found[0]["role"] == "system":
        found[0]["content"] += f"\n\n{instructions}"
        return found
    return [{"role": "system", "content": instructions}, *found]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its calls in its content, or a tool's result in the user's turn."""
    content, role = message["content"], message["role"]
    for call in message.get("tool_calls", ()):
        text = json.dumps(call["function"], ensure_ascii=False)
        content += f"{chr(10) if content else ''}<tool_call>\n{text}\n</tool_call>"
    if role == "tool":
        role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
    kept = {name: each for name, each in message.items() if name not in _TOOL_FIELDS}
    return {**kept, "role": role, "content": content}


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
