"""From a body to a prompt: a chat through the model's template, text and token ids as they are.

A chat's messages and tools are in OpenAI's form. What a template cannot express, such as tools or
the results of calls, becomes text here. `constraints/tool_calls.py` splits the answer.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from paceline.constraints.call_form import ToolForm
from paceline.constraints.tool_calls import ToolCall, written_calls
from paceline.constraints.tool_forms import HERMES, tool_form
from paceline.decoding.reasoning import ReasoningMarks
from paceline.decoding.text import showing
from paceline.errors import InvalidRequest, ModelError
from paceline.models import Thinking, TokenBytes, infill_of
from paceline.options import TEMPLATE_NAMES
from paceline.runtime.model import Model
from paceline.runtime.prompt import RenderedChat, reasoning_marks, render_chat
from paceline.server.body import ChatBody, Message, Tool
from paceline.server.errors import ApiError, prompt_too_long
from paceline.server.settings import Settings

_SAMPLED_CHARACTERS = 16
"""Characters of a long text, for each token of the context, that are tokenized to see whether it
may fit."""

_OPENING = 32
"""Tokens at a prompt's end that may have the mark that opens a thought."""

_EFFORT = "reasoning_effort"
"""Template variable of a request's reasoning effort."""

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


class Prompts:
    """The prompts of one model. Thread-safe."""

    def __init__(self, model: Model, name: str, settings: Settings, max_length: int) -> None:
        """Prepare; `max_length` is the most tokens of prompt and answer together.

        `name` is the model's in the API.

        Raises InvalidRequest if the chat template cannot do what the setting `think` says.
        """
        self._model, self.files, self._name = model, model.files, name
        self._max_length = max_length
        self._parse_special = settings.parse_special
        think = settings.think
        self._thinking = {} if think is None else self.files.thinking().switch(think)
        self.token_bytes = TokenBytes(self.files.tokenizer())
        self.infill = infill_of(self.files.tokenizer())

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """How the model writes tool calls; None: in no known form, so that they remain text."""
        return tool_form(self.files.chat_template)

    def tokens(self, prompt: str | list[int], field: str = "prompt") -> list[int]:
        """Token ids of a prompt without the chat template; `field` is the body's, for errors.

        Raises ApiError: it is empty or too long, or has an unknown token id.
        """
        least = self.min_tokens(prompt) if isinstance(prompt, str) else len(prompt)
        if least > self._max_length:  # not worth tokenizing
            raise prompt_too_long(least, self._max_length, at_least=isinstance(prompt, str))
        try:
            return self._fitting(self._model.tokens(prompt, raw=True))
        except InvalidRequest as error:
            raise ApiError(f"{field}: {error}", param=field) from error

    def chat_tokens(self, text: str) -> list[int]:
        """Token ids of a chat that the template rendered. Raises ApiError if it is too long."""
        if not text:
            raise ApiError("the prompt is empty; expected a message with text", param="messages")
        least = self.min_tokens(text)
        if least > self._max_length:  # not worth tokenizing
            raise prompt_too_long(least, self._max_length, at_least=True)
        return self._fitting(self.files.control_text().encode(text))

    def infill_tokens(self, prompt: str | list[int], suffix: str) -> list[int]:
        """Token ids of a prompt that asks for the text between `prompt` and `suffix`.

        Raises ApiError: it is too long, or the model does not fill in the middle.
        """
        prefix = self.tokens(prompt)
        if self.infill is None:
            raise ApiError(
                f"{self._name} has no tokens to fill in the middle; leave suffix away",
                param="suffix",
            )
        least = len(prefix) + self.min_tokens(suffix)
        if least <= self._max_length:
            tokens = self.infill.prompt(prefix, suffix)
            if len(tokens) < self._max_length:
                return tokens
            least = len(tokens)
        raise prompt_too_long(least, self._max_length, at_least=True)

    def continued(self, prompt: Sequence[int], count: int) -> ReasoningMarks:
        """How to read on in an answer to a chat, whose tokens so far are the last of a prompt."""
        chat, answer = prompt[:-count], tuple(prompt[-count:])
        thinking = self.files.thinking()
        form = thinking.form
        if form is None:
            return ReasoningMarks((), (), {}, continued=answer)
        decode = showing(self.files.tokenizer().decode, thinking.tokens_of(form))
        inside = thinking.ends_inside(decode(chat[-_OPENING:]))
        return reasoning_marks(thinking, inside=inside, continued=answer)

    def min_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens, from tokenizing at most its beginning."""
        sampled = _SAMPLED_CHARACTERS * self._max_length
        if len(text) > 2 * sampled:
            # The cut may be inside a word: the tokens there may merge with later text, but never
            # half of all.
            count = len(self.files.control_text().encode(text[:sampled])) // 2
            if count > self._max_length:
                return count
        return self.token_bytes.min_tokens(text)

    def chat(self, body: ChatBody) -> RenderedChat:
        """The text of a chat with the prompt for an answer, and the form of the answer's thoughts.

        Raises ApiError or InvalidRequest if the chat template cannot do what the body asks.
        """
        if reserved := TEMPLATE_NAMES & body.chat_template_kwargs.keys():
            raise ApiError(f"cannot set {min(reserved)}", param="chat_template_kwargs")
        tools = body.tools if body.calling else []
        messages = self.messages(body.messages, tools)
        listed: Any = None
        if tools and self._template_has_tools:
            listed = self._guarded([tool.model_dump(exclude_none=True) for tool in tools])
        variables: dict[str, Any] = self._guarded(body.chat_template_kwargs)
        if effort := body.reasoning_effort:
            try:
                variables = {**self.files.thinking().effort(effort), **variables}
            except InvalidRequest as error:
                raise ApiError(f"{effort!r}: {error}", param="reasoning_effort") from error
        return self.render(messages, tools=listed, variables=variables)

    def messages(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[dict[str, Any]]:
        """Messages as the chat template expects them; they have `tools` if it knows none.

        Names of control tokens in them are guarded. Raises ApiError or InvalidRequest.
        """
        chat = template_messages(messages, self.files.thinking())
        if not self._parse_special:
            chat = self.files.control_text().guarded_messages(chat)
        if self._template_has_tools:
            if not any({"tool_calls", "tool_call_id"} & message.keys() for message in chat):
                return chat
            return fit_calls(chat, self.tool_form, self.files.chat_template or "")
        texts = [self._guarded(tool.model_dump_json(exclude_none=True)) for tool in tools]
        return describe_tools(chat, texts, self.tool_form or HERMES)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generate: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The text of a chat, and the form of the answer's thoughts.

        With `generate` the text ends with the prompt for an answer. Without a reasoning effort
        among the variables, those of the setting `think` are added.

        Raises:
            InvalidRequest: the template rejects the messages.
            ApiError: the model has no template, or the template fails.
        """
        variables = dict(variables or {})
        if _EFFORT not in variables:
            variables = {**self._thinking, **variables}
        try:
            if generate:
                return render_chat(self.files, messages, variables, tools)
            text = self.files.template().render(
                messages, tools=tools, add_generation_prompt=False, **variables
            )
            return RenderedChat(text, None)
        except ModelError as error:
            reason = str(error).partition(";")[0]
            raise ApiError(f"{reason}; use /v1/completions", param="messages") from error

    def _fitting(self, tokens: list[int]) -> list[int]:
        """The tokens, if an answer fits beside them."""
        if len(tokens) >= self._max_length:
            raise prompt_too_long(len(tokens), self._max_length)
        return tokens

    @property
    def _template_has_tools(self) -> bool:
        """Whether the chat template describes tools to the model."""
        return "tools" in (self.files.chat_template or "")

    def _guarded(self, value: Any) -> Any:
        """A request's JSON with names of control tokens guarded, unless they are to be parsed."""
        return value if self._parse_special else self.files.control_text().guarded(value)


def template_messages(messages: Sequence[Message], thinking: Thinking) -> list[dict[str, Any]]:
    """Messages for a chat template: parsed arguments, and `developer` becomes `system`.

    `thinking` has the names under which the template expects the thoughts of earlier answers.
    Raises ApiError for a tool's result without its call.
    """
    chat = []
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
        fields: dict[str, Any] = {"role": role, "content": message.content or ""}
        fields |= thinking.message_fields(message.reasoning_content)
        if message.name is not None:
            fields["name"] = message.name
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            fields["tool_calls"] = [
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
        chat.append(fields)
    return chat


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
    chat: Sequence[dict[str, Any]], tools: Sequence[str], form: ToolForm = HERMES
) -> list[dict[str, Any]]:
    """A chat with its tools as plain text, for a template that does not support tools.

    `tools` are their JSON texts. With the form `HERMES` calls and results are text, too; templates
    of another form have them.
    """
    described = [dict(message) for message in chat]
    if form.name == HERMES.name:
        described = [_as_text(message) for message in chat]
    if not tools:
        return described
    instructions = _INSTRUCTIONS.replace("{}", "\n".join(tools), 1) + written_calls(
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
    kept = {name: value for name, value in message.items() if name not in _TOOL_FIELDS}
    return {**kept, "role": role, "content": content}


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
