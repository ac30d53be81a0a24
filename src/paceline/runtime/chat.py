"""A chat in OpenAI's form through the model's template.

All doors come here: Python's messages and those of the server's APIs. What a template cannot
express, such as tools or the results of calls, becomes text. `constraints/tool_calls.py` splits the
answer; `models/templates/roles.py` changes orders of roles that a template does not render.

A template also decides how the answer's reasoning is marked (`models/templates/marks.py`); the
marks go on to `decoding/reasoning.py`, which divides the answer.

Invariant: a text of a message is guarded before ours are added to it.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from paceline.constraints.tool_calls import ToolCall, written_calls
from paceline.constraints.tool_forms import HERMES, ToolForm, tool_form
from paceline.decoding.reasoning import ReasoningMarks
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles, Thinking

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}"""

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

_FIRST_CALL = re.compile(r"tool_calls['\"\])]*\[0\]")
_EACH_CALL = re.compile(r"\bin\s[^%}]*tool_calls")
"""In templates that render every call of a message; those with the other alone render one."""

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part of a content -> its field with text."""


class TemplateChat(NamedTuple):
    """What a chat template renders."""

    messages: list[dict[str, Any]]
    tools: list[Mapping[str, Any]] | None
    """Tools that the template describes; None: it cannot, or there are none."""


def template_chat(
    files: ModelFiles,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    parse_special: bool = False,
) -> TemplateChat:
    """Messages and tools in OpenAI's form, as the chat template of a model reads them.

    Names of control tokens in them are guarded, unless they are to be parsed. Raises InvalidRequest
    for a content that is no text, and for a tool's result without its call.
    """
    source = files.chat_template or ""
    chat, listed = template_messages(messages, files.thinking()), [*tools]
    if not parse_special:
        control = files.control_text()
        chat, listed = control.guarded_messages(chat), control.guarded(listed)
    has_calls = any(message.keys() & {*_TOOL_FIELDS} for message in chat)
    if "tools" not in source and (listed or has_calls):
        return TemplateChat(describe_tools(chat, listed, tool_form(source) or HERMES), None)
    if has_calls:
        chat = fit_calls(chat, tool_form(source), source)
    return TemplateChat(chat, listed or None)


class RenderedChat(NamedTuple):
    """A prompt that the chat template made."""

    text: str
    thoughts: ReasoningMarks | None
    """How the answer's reasoning is marked; None: in no known way."""


def render_chat(
    files: ModelFiles,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> RenderedChat:
    """Return the text of the prompt; `variables` and `tools` are for the template.

    Raises:
        InvalidRequest: the template refuses the messages.
        ModelError: there is no template, or it fails.
    """
    template, thinking = files.template(), files.thinking()
    text = template.render(messages, tools=tools, **variables)
    form = thinking.form
    if form is None:
        return RenderedChat(text, None)

    def bare() -> str:
        return template.render(messages, tools=tools, **variables, add_generation_prompt=False)

    return RenderedChat(text, reasoning_marks(thinking, inside=thinking.inside(text, bare)))


def reasoning_marks(
    thinking: Thinking, *, inside: bool, continued: tuple[int, ...] = ()
) -> ReasoningMarks:
    """How to tell thoughts in an answer, of a model that has a form; see `ReasoningMarks`."""
    form = thinking.form
    assert form is not None
    return ReasoningMarks(
        form.opens,
        form.closes,
        thinking.tokens_of(form),
        label=form.label,
        wrap=thinking.wrap,
        inside=inside,
        channels=form.channels,
        continued=continued,
    )


def text_of(content: Any) -> str:
    """The text of a content: a string, or a list of parts, which newlines join.

    Newlines as llama.cpp and vLLM have them. Raises InvalidRequest for other parts and values.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"is of type {type(content).__name__}; expected text or a list of it")
    texts = []
    for place, part in enumerate(content):
        name = _TEXTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
        if name is None:
            raise InvalidRequest(
                f"part {place} is not of type text; images, audio and files are not supported"
            )
        if not isinstance(part.get(name), str):
            raise InvalidRequest(f"part {place} has no {name}")
        texts.append(part[name])
    return "\n".join(texts)


def template_messages(messages: Sequence[Message], thinking: Thinking) -> list[dict[str, Any]]:
    """Messages with text as their content and parsed arguments; `developer` becomes `system`.

    `thinking` has the names under which the template expects the thoughts of earlier answers.
    Raises InvalidRequest as `template_chat` does.
    """
    chat = []
    called: set[str | None] = set()
    for place, message in enumerate(messages):
        fields, where = dict(message), f"messages[{place}]"
        role, content = fields.get("role"), fields.get("content")
        try:
            is_absent = content is None and role == "assistant"
            fields["content"] = "" if is_absent else text_of(content)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}.content: {error}") from None
        if role == "developer":
            fields["role"] = "system"
        fields |= thinking.message_fields(
            fields.get("reasoning_content") or fields.get("reasoning")
        )
        calls = fields.pop("tool_calls", None)
        if calls:
            fields["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in calls]
            called |= {call["id"] for call in fields["tool_calls"]}
        if role == "tool" and not {None, fields.get("tool_call_id")} & called:
            raise InvalidRequest(
                f"{where}.tool_call_id: the result of a tool without its call; expected the id of "
                "a call in an earlier message of the assistant"
            )
        chat.append(fields)
    return chat


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call with its id and parsed arguments."""
    try:
        function = {**call["function"], "arguments": _arguments(call["function"]["arguments"])}
        call = {"id": None, "type": "function", **call, "function": function}
    except (TypeError, KeyError):
        raise InvalidRequest(
            f"{where}: expected {{'id': ..., 'function': {{'name': ..., 'arguments': ...}}}}"
        ) from None
    return call  # type: ignore[no-any-return]


def fit_calls(
    chat: Sequence[dict[str, Any]], form: ToolForm | None, template: str
) -> list[dict[str, Any]]:
    """A chat with its calls and their results as a template that supports tools expects them."""
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
        for message in fitted:  # beside calls the template takes thoughts or content, not both
            thoughts, content = message.get("thinking"), message.get("content")
            if thoughts and content and message.get("tool_calls"):
                message |= {"thinking": f"{thoughts}\n\n{content}", "content": ""}
    if _FIRST_CALL.search(template) and not _EACH_CALL.search(template):
        return _with_one_call_each(fitted)
    if "tool_responses" in template and not _TOOL_ROLE.search(template):
        return _with_responses(fitted)
    return fitted


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


def _with_one_call_each(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat with a message for each call, and its results after it, as Llama 3's templates need.

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
    """A chat with results in the message that called, as Gemma 4's templates read them."""
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
    """A chat with its tools as JSON text, for a template that does not support tools.

    With the form `HERMES` calls and results are text, too; templates of another form have them.
    """
    described = [dict(message) for message in chat]
    if form.name == HERMES.name:
        described = [_as_text(message) for message in chat]
    if not tools:
        return described
    texts = [json.dumps(tool, ensure_ascii=False, separators=(",", ":")) for tool in tools]
    instructions = _INSTRUCTIONS.replace("{}", "\n".join(texts), 1) + written_calls(
        form, [_EXAMPLE]
    )
    if described[0]["role"] == "system":
        described[0]["content"] += f"\n\n{instructions}"
        return described
    return [{"role": "system", "content": instructions}, *described]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its calls in its content, or a tool's result in the user's turn."""
    content, role = message["content"], message["role"]
    for call in message.get("tool_calls", ()):
        text = json.dumps(call["function"], ensure_ascii=False)
        content += f"{chr(10) if content else ''}<tool_call>\n{text}\n</tool_call>"
    if role == "tool":
        role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
    others = {name: value for name, value in message.items() if name not in _TOOL_FIELDS}
    return {**others, "role": role, "content": content}


def _arguments(value: Any) -> Any:
    """Parsed arguments; text that is no object remains as it is."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value
