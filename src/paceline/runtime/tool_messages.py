"""Tools and calls in a chat, in the format of a model's chat template.

A template without tools gets them as text. `tools/calls.py` splits the answer. Only
chats with tools use this module, with messages of `prompt.template_messages`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.tools.calls import ToolCall, written_calls
from paceline.tools.forms import HERMES, ToolForm, tool_form

_INSTRUCTIONS = """You may call functions to help with the user's request. These are the functions:
<tools>
{}
</tools>
To call one, answer with its name and its arguments as JSON:
"""
_EXAMPLE = ToolCall("the function's name", '{"the argument\'s name": "its value"}')

TOOL_FIELDS = {"tool_calls", "tool_call_id", "name"}
"""Fields of a message that a template without tools does not support."""

_TOOL_ROLE = re.compile(r"""role['"\])\s]*(==|!=|in)[^%}]*?['"]tool['"]""")
"""Occurs in templates that support messages of the role `tool`."""

_FIRST_CALL = re.compile(r"tool_calls['\"\])]*\[0\]")
_EACH_CALL = re.compile(r"\bin\s[^%}]*tool_calls")
"""Occurs in templates that render all calls; those with `_FIRST_CALL` alone render one."""


def fit_tools(
    chat: Sequence[dict[str, Any]], tools: Sequence[Any], template: str
) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Return the messages and the tools for a template; None if it takes none or none are given."""
    form = tool_form(template)
    if "tools" not in template:
        return describe_tools(chat, tools, form or HERMES), None
    return fit_calls(chat, form, template), [*tools] or None


def fit_calls(
    chat: Sequence[dict[str, Any]], form: ToolForm | None, template: str
) -> list[dict[str, Any]]:
    """Return a chat with calls and results in the format that a template with tools expects."""
    fitted = [dict(message) for message in chat]
    if form and form.name == "kimi":
        _name_ids(fitted)
    if form and form.id_length:
        for message in fitted:
            if message.get("tool_call_id"):
                message["tool_call_id"] = _short_id(message["tool_call_id"], form.id_length)
            for call in message.get("tool_calls", ()):
                call["id"] = _short_id(call["id"] or "", form.id_length)
    if form and "tool_calls" not in template:
        for message in fitted:
            functions = [call["function"] for call in message.pop("tool_calls", ())]
            calls = [ToolCall(one["name"], _object(one["arguments"])) for one in functions]
            message["content"] += written_calls(form, calls) if calls else ""
    if form and form.channels:
        for message in fitted:  # with calls, the template supports reasoning or content, not both
            thoughts, content = message.get("thinking"), message.get("content")
            if thoughts and content and message.get("tool_calls"):
                message |= {"thinking": f"{thoughts}\n\n{content}", "content": ""}
    if _FIRST_CALL.search(template) and not _EACH_CALL.search(template):
        return _with_one_call_each(fitted)
    if "tool_responses" in template and not _TOOL_ROLE.search(template):
        return _with_responses(fitted)
    return fitted


def _name_ids(chat: Sequence[dict[str, Any]]) -> None:
    """Give calls and their results the ids that Kimi's template expects."""
    ids: dict[str | None, str] = {}
    for message in chat:
        for place, call in enumerate(message.get("tool_calls", ())):
            ids[call["id"]] = call["id"] = f"functions.{call['function']['name']}:{place}"
        if message.get("tool_call_id") in ids:
            message["tool_call_id"] = ids[message["tool_call_id"]]


def _short_id(text: str, length: int) -> str:
    """Return an id of letters and digits; the same for the same text."""
    if len(text) == length and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:length]


def _with_one_call_each(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat with one message per call, before the call's results, for Llama 3's templates.

    call a, call b, result a, result b  ->  call a, result a, call b, result b
    """
    blocks: list[list[dict[str, Any]]] = []
    by_id: dict[str | None, list[dict[str, Any]]] = {}
    for message in chat:
        if message["role"] == "tool" and blocks:
            by_id.get(message.get("tool_call_id"), blocks[-1]).append(message)
            continue
        by_id = {}
        for call in message.get("tool_calls", ()):
            called = {"role": "assistant", "content": ""} if by_id else message
            by_id[call["id"]] = [{**called, "tool_calls": [call]}]
            blocks.append(by_id[call["id"]])
        if not by_id:
            blocks.append([message])
    return [message for block in blocks for message in block]


def _with_responses(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat with results in the message that called, for Gemma 4's templates."""
    fitted: list[dict[str, Any]] = []
    names: dict[str | None, str] = {}
    for message in chat:
        calls = message.get("tool_calls", ())
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if message["role"] == "tool" and fitted and fitted[-1].get("tool_calls"):
            name = names.get(message.get("tool_call_id"), "unknown")
            response = {"name": name, "response": message["content"]}
            fitted[-1].setdefault("tool_responses", []).append(response)
        else:
            fitted.append(dict(message))
    return fitted


def describe_tools(
    chat: Sequence[dict[str, Any]], tools: Sequence[Any], form: ToolForm = HERMES
) -> list[dict[str, Any]]:
    """Return a chat with its tools as JSON text, for a template that does not support tools.

    With the format `HERMES`, calls and results also become text; other templates render them.
    """
    is_text = form.name == HERMES.name
    described = [_as_text(message) if is_text else dict(message) for message in chat]
    if not tools:
        return described
    texts = [json.dumps(tool, ensure_ascii=False, separators=(",", ":")) for tool in tools]
    instructions = _INSTRUCTIONS.replace("{}", "\n".join(texts), 1)
    instructions += written_calls(form, [_EXAMPLE])
    if described[0]["role"] == "system":
        described[0]["content"] += f"\n\n{instructions}"
        return described
    return [{"role": "system", "content": instructions}, *described]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its calls in its content, or a tool's result in the user's turn."""
    content, role = message["content"], message["role"]
    for call in message.get("tool_calls", ()):
        text = f"<tool_call>\n{_json(call['function'])}\n</tool_call>"
        content += f"\n{text}" if content else text
    if role == "tool":
        role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
    others = {name: value for name, value in message.items() if name not in TOOL_FIELDS}
    return {**others, "role": role, "content": content}


def _object(value: Any) -> str:
    """Return arguments as the text of an object; other values become an empty one."""
    return _json(value if isinstance(value, Mapping) else {})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
