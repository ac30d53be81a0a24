"""Prompts as token ids: a chat through the model's template, text through the tokenizer.

All entry points use this module: Python's messages and those of the server's APIs, in OpenAI's
format. Content that a template does not support, such as tools or tool results, becomes text
(`tool_messages.py`); `models/templates/roles.py` changes unsupported orders of roles.

A template also determines the tags of the answer's reasoning (`models/templates/marks.py`). The
tags are passed to `decoding/reasoning.py`, which divides the answer.

Invariant: a text of a message is guarded before paceline's own texts are added to it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from paceline.decoding.reasoning import ReasoningMarks
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles, Thinking
from paceline.options import TEMPLATE_NAMES
from paceline.runtime.request import Request
from paceline.runtime.tool_messages import TOOL_FIELDS, fit_tools

Message = Mapping[str, Any]
"""A message, such as {"role": "user", "content": "..."}."""

Prompt = str | Sequence[Message] | Sequence[int]
"""A user's message, the messages of a chat, or token ids."""

Prompts = list[str] | list[list[Message]] | list[list[int]] | list[Prompt]
"""Several prompts, which are answered together."""


class EncodedPrompt(list[int]):
    """The token ids of a prompt that was rendered, with the expected reasoning tags.

    A caller that checks a prompt before the model is open passes it on: it is rendered only once.
    """

    def __init__(self, tokens: Sequence[int], thoughts: ReasoningMarks | None) -> None:
        super().__init__(tokens)
        self.thoughts = thoughts


SYSTEM_ROLES = ("system", "developer")

TEXTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **{"refusal": "refusal", "input_json": "data"},
}
"""Type of a part of a content -> its field with text, or with JSON that is written as text."""


def batch_of(prompt: Prompt | Prompts) -> list[Prompt] | None:
    """Return the prompts of a list of prompts; None for a single prompt.

    A list of strings, or of lists, is a batch. A list of messages, or of token ids, is one prompt.

    Raises InvalidRequest for a value that is not a prompt, and for a list of mixed kinds.
    """
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest(f"the prompt is of type {type(prompt).__name__}; expected {_EXPECTED}")
    kinds = set[str]()
    for number, item in enumerate(prompt):
        kind = next((name for name, types in _KINDS.items() if isinstance(item, types)), None)
        if kind is None or isinstance(item, bool):
            raise InvalidRequest(
                f"item {number} of the prompt is of type {type(item).__name__}; expected "
                f"{_EXPECTED}"
            )
        kinds.add(kind)
    if kinds and kinds <= {"strings", "lists"}:
        return list(cast("Sequence[Prompt]", prompt))
    if len(kinds) > 1:
        raise InvalidRequest(
            f"the prompt is a list of {' and '.join(sorted(kinds))}; a list of strings is a "
            "batch, and a list of messages is one chat: give one of them"
        )
    return None


_EXPECTED = "a string, messages, token ids, or a list of these"
_KINDS = {"strings": str, "lists": list | tuple, "messages": Mapping, "token ids": int}
"""Kind of a list -> the type of its items."""


def check_room(count: int, context: int) -> None:
    """Raise InvalidRequest if a prompt of `count` tokens leaves no room for an answer."""
    if count >= context:
        raise InvalidRequest(
            f"the prompt has {count} tokens and the context holds {context}, the answer included; "
            "shorten the prompt"
        )


def check_ids(what: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest, which names `what`, for a token id outside the vocabulary."""
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{what} has the token id {token}; expected 0 to {vocab_size - 1}, the model's "
                "vocabulary"
            )


def encode_prompt(files: ModelFiles, prompt: Prompt, request: Request) -> tuple[list[int], Request]:
    """Return the prompt's token ids, and the request with the expected reasoning tags.

    Raises InvalidRequest for a value that is not a prompt or that the chat template rejects, and
    ModelError if the prompt needs a template and the model has none.
    """
    if batch_of(prompt) is not None:
        raise InvalidRequest(
            f"this is a list of {len(prompt)} prompts; give one, or use generate or as_completed"
        )
    if isinstance(prompt, EncodedPrompt):
        return [*prompt], _with_thoughts(request, prompt.thoughts)
    if not prompt:
        raise InvalidRequest("the prompt is empty; expected some text or a message")
    tokenizer = files.tokenizer
    bare = request.raw if isinstance(prompt, str) else isinstance(prompt[0], int)
    if bare and (request.think is not None or request.template_kwargs or request.system):
        raise InvalidRequest(
            "system, think and template_kwargs are for the chat template; give messages, or leave "
            "out these options and raw"
        )
    if isinstance(prompt, str):
        if request.raw:
            return tokenizer.encode(prompt, special=True), request
        prompt = [{"role": "user", "content": prompt}]
    if all(isinstance(item, int) for item in prompt):
        return list(cast("Sequence[int]", prompt)), request
    messages = cast("Sequence[Message]", prompt)
    if request.system is not None:
        messages = _with_system(messages, request.system)
    chat = template_chat(files, messages, parse_special=request.parse_special)
    control, variables = files.control_text, dict(request.template_kwargs)
    files.thinking.check(variables, TEMPLATE_NAMES)
    if not request.parse_special:
        variables = control.guarded(variables)
    if request.think is not None:
        variables = {**files.thinking.switch(request.think), **variables}
    if request.constraint is not None and chat.begun:
        raise InvalidRequest(BEGUN_STRUCTURE)
    text, thoughts = render_chat(files, chat, variables)
    return control.encode(text), _with_thoughts(request, thoughts)


def _with_thoughts(request: Request, thoughts: ReasoningMarks | None) -> Request:
    """Return the request with the reasoning tags; a grammar has no place for reasoning."""
    return request if request.constraint is not None else replace(request, thoughts=thoughts)


def _with_system(messages: Sequence[Message], system: str) -> Sequence[Message]:
    if any(message.get("role") in SYSTEM_ROLES for message in messages):
        raise InvalidRequest(
            "system is given, and the messages have a system message; omit one of them"
        )
    return [{"role": "system", "content": system}, *messages]


class TemplateChat(NamedTuple):
    """The input of a chat template."""

    messages: list[dict[str, Any]]
    tools: list[Mapping[str, Any]] | None = None
    """Tools that the template describes; None: it does not support them, or there are none."""
    begun: bool = False
    """True if the chat ends with text of the assistant, which is continued."""


def template_chat(
    files: ModelFiles,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    parse_special: bool = False,
) -> TemplateChat:
    """Convert messages and tools from OpenAI's format to that of a model's chat template.

    Special tokens in them are guarded, unless they are to be parsed. Raises InvalidRequest for
    content other than text, and for a tool's result without its call.
    """
    chat, listed = template_messages(messages, files.thinking), [*tools]
    last = chat[-1] if chat else {}
    begun = last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last
    if not parse_special:
        control = files.control_text
        chat, listed = control.guarded_messages(chat), control.guarded(listed)
    if not listed and not any(message.keys() & TOOL_FIELDS for message in chat):
        return TemplateChat(chat, begun=begun)
    return TemplateChat(*fit_tools(chat, listed, files.chat_template or ""), begun)


class RenderedChat(NamedTuple):
    text: str
    thoughts: ReasoningMarks | None
    """Tags of the answer's reasoning; None: the format is unknown."""


BEGUN_STRUCTURE = (
    "the last message is the assistant's, and a structured answer cannot be continued; end with "
    "the user's message"
)

_CUT = "\ufdd2\ufdd3\ufdd2"
"""Noncharacters after a begun answer, to find its end in the rendered chat."""


def render_chat(
    files: ModelFiles, chat: TemplateChat, variables: Mapping[str, Any]
) -> RenderedChat:
    """Return the text of the prompt; `variables` are for the template.

    For a chat that has `begun` an answer, the text ends inside the last message, which the answer
    continues. Raises InvalidRequest if the template rejects the messages, or cannot leave the last
    one open, and ModelError if there is none, or it fails.
    """
    thinking, form = files.thinking, files.thinking.form
    render: Callable[..., str] = partial(files.template.render, tools=chat.tools, **variables)
    if chat.begun:
        *earlier, last = chat.messages
        answer: str = last["content"]
        marked = [*earlier, {**last, "content": answer + _CUT}]
        text, *rest = render(marked, add_generation_prompt=False).split(_CUT)
        if len(rest) != 1:
            raise InvalidRequest(
                f"the last message is the assistant's, and the chat template of {files.short_name} "
                "cannot continue it; end with the user's message"
            )
        if form and earlier and not any(mark in answer for mark in form.opens):
            start = text.removesuffix(answer)
            with suppress(InvalidRequest):
                prompt = render(earlier)
                # The answer began after an empty reasoning block, which the template omits.
                if prompt.startswith(start) and any(m in prompt[len(start) :] for m in form.closes):
                    text = prompt + answer
        inside = thinking.ends_in_reasoning(answer, str)
    else:
        text = render(chat.messages)
        bare = partial(render, chat.messages, add_generation_prompt=False)
        inside = thinking.ends_in_reasoning(text, bare)
    return RenderedChat(text, reasoning_marks(thinking, inside=inside) if form else None)


def reasoning_marks(
    thinking: Thinking, *, inside: bool, continued: tuple[int, ...] = ()
) -> ReasoningMarks:
    """Return the tags of reasoning in an answer, for a model that has a format for it."""
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
    """Return the text of a content: a string, or a list of parts, which newlines join.

    llama.cpp and vLLM also join with newlines. Raises InvalidRequest for other parts and values,
    with a message to append to the content's path.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f": is of type {type(content).__name__}; expected text or a list")
    texts = []
    for place, part in enumerate(content):
        name = TEXTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
        if name is None:
            raise InvalidRequest(
                f"[{place}]: is not of type text; images, audio and files are not supported"
            )
        text = json.dumps(part.get(name), ensure_ascii=False) if name == "data" else part.get(name)
        if not isinstance(text, str):
            raise InvalidRequest(f"[{place}].{name}: expected text")
        texts.append(text)
    return "\n".join(texts)


def template_messages(messages: Sequence[Message], thinking: Thinking) -> list[dict[str, Any]]:
    """Return messages with text as content and parsed arguments; `developer` becomes `system`.

    Empty answers at the end are dropped: agents send them after a turn that was aborted.
    `thinking` has the field names that the template uses for the reasoning of earlier answers.
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
            raise InvalidRequest(f"{where}.content{error}") from None
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
    while len(chat) > 1 and _is_empty_answer(chat[-1]):
        chat.pop()
    return chat


def _is_empty_answer(message: Message) -> bool:
    is_answer = message.get("role") == "assistant" and "tool_calls" not in message
    return is_answer and not message["content"].strip()


def _call(call: Any, where: str) -> dict[str, Any]:
    try:
        function = {**call["function"], "arguments": _arguments(call["function"]["arguments"])}
        call = {"id": None, "type": "function", **call, "function": function}
    except (TypeError, KeyError):
        raise InvalidRequest(
            f"{where}: expected {{'id': ..., 'function': {{'name': ..., 'arguments': ...}}}}"
        ) from None
    return call  # type: ignore[no-any-return]


def _arguments(value: Any) -> Any:
    """Parse arguments; text that is not an object remains unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value
