"""Converts a body to a prompt: renders chats with the model's template; other text is unchanged.

A chat's messages and tools are in OpenAI's format; `runtime/prompt.py` fits them to the template.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from paceline.decoding.reasoning import ReasoningMarks
from paceline.decoding.text import showing
from paceline.errors import InvalidRequest, ModelError
from paceline.models import infill_of
from paceline.options import TEMPLATE_NAMES
from paceline.runtime.model import Model
from paceline.runtime.prompt import (
    BEGUN_STRUCTURE,
    RenderedChat,
    TemplateChat,
    reasoning_marks,
    render_chat,
    template_chat,
)
from paceline.server.body import ChatBody, Message
from paceline.server.errors import ApiError, field_error, prompt_too_long
from paceline.server.json_body import Tool
from paceline.server.settings import Settings
from paceline.tools.forms import ToolForm, tool_form

_SAMPLED_CHARACTERS = 16
"""Characters per context token of a long text that are tokenized to estimate whether it
fits."""

_OPENING = 32
"""Tokens at a prompt's end that may contain the opening tag of reasoning."""

_EFFORT = "reasoning_effort"
"""Template variable of a request's reasoning effort."""


class Prompts:
    """The prompts of one model. Thread-safe."""

    def __init__(self, model: Model, name: str, settings: Settings, max_length: int) -> None:
        """Prepare; `name` is the model's API name, `max_length` limits prompt and answer together.

        Raises InvalidRequest if the chat template does not support the value of `think`.
        """
        self._model, self.files, self._name = model, model.files, name
        self._max_length = max_length
        self._parse_special = settings.parse_special
        think = settings.think
        self._thinking = {} if think is None else self.files.thinking.switch(think)
        self.token_bytes = model._token_bytes
        self.infill = infill_of(self.files.tokenizer)

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """The model's tool call format; None if unknown, so that calls remain text."""
        return tool_form(self.files.chat_template)

    def tokens(self, prompt: str | list[int], field: str = "prompt") -> list[int]:
        """Return a prompt's token ids without the chat template; an ApiError names `field`."""
        if isinstance(prompt, str):
            self.check_length(prompt)
        elif len(prompt) > self._max_length:  # too long to check
            raise prompt_too_long(len(prompt), self._max_length)
        with _of_field(field):
            return self._fitting(self._model.tokens(prompt, raw=True))

    def chat_tokens(self, text: str) -> list[int]:
        """Return the token ids of a rendered chat. Raises ApiError if it is too long."""
        if not text:
            raise ApiError("the prompt is empty; expected a message with text", param="messages")
        self.check_length(text)
        return self._fitting(self.files.control_text.encode(text))

    def check_length(self, text: str, after: int = 0) -> None:
        """Raise ApiError for a text that, after `after` tokens, is certainly too long."""
        min_length = after + self.min_tokens(text)
        if min_length > self._max_length:
            raise prompt_too_long(min_length, self._max_length, at_least=True)

    def infill_tokens(self, prompt: str | list[int], suffix: str) -> list[int]:
        """Return the token ids of a prompt for the text between `prompt` and `suffix`."""
        prefix = self.tokens(prompt)
        if self.infill is None:
            raise ApiError(
                f"{self._name} does not support fill-in-the-middle; remove suffix",
                param="suffix",
            )
        self.check_length(suffix, after=len(prefix))
        return self._fitting(self.infill.prompt(prefix, suffix))

    def continued(self, prompt: Sequence[int], count: int) -> ReasoningMarks:
        """Return the tags to continue a chat answer: the last `count` tokens of a prompt."""
        chat, answer = prompt[:-count], tuple(prompt[-count:])
        thinking = self.files.thinking
        form = thinking.form
        if form is None:
            return ReasoningMarks((), (), {}, continued=answer)
        decode = showing(self.files.tokenizer.decode, thinking.tokens_of(form))
        inside = thinking.ends_inside(decode(chat[-_OPENING:]))
        return reasoning_marks(thinking, inside=inside, continued=answer)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of a text's tokens, from tokenizing at most its beginning."""
        sampled = _SAMPLED_CHARACTERS * self._max_length
        if len(text) > 2 * sampled:
            # The cut may be inside a word: the tokens there may merge with later text, but never
            # half of all.
            count = len(self.files.control_text.encode(text[:sampled])) // 2
            if count > self._max_length:
                return count
        return self.token_bytes.min_tokens(text)

    def chat(self, body: ChatBody) -> RenderedChat:
        """Return a chat's text with the prompt for an answer, and the answer's reasoning format.

        Raises ApiError or InvalidRequest if the chat template does not support the body's options.
        """
        if body.tool_choice not in ("none", "auto") and not body.tools:
            raise ApiError("tool_choice requires a tool call, but tools is empty", param="tools")
        chat = self.template_chat(body.messages, body.tools if body.calling else [])
        if body.continues and not chat.begun:
            raise field_error(
                "continue_final_message", "the last message is not an assistant's text"
            )
        chat = chat._replace(begun=chat.begun and body.continues is not False)
        if chat.begun and (body.structured or body.forced):
            raise ApiError(BEGUN_STRUCTURE, param="messages")
        variables = dict(body.chat_template_kwargs)
        with _of_field("chat_template_kwargs"):
            self.files.thinking.check(variables, TEMPLATE_NAMES)
        if effort := body.reasoning_effort:
            with _of_field("reasoning_effort"):
                variables = {**self.files.thinking.effort(effort), **variables}
        if not self._parse_special:
            variables = self.files.control_text.guarded(variables)
        try:
            return self.render(chat, variables)
        except (ApiError, InvalidRequest) as error:
            if not (found := re.match(r"messages\[(\d+)\]", message := str(error))):
                raise
            place = "messages"
            if len(chat.messages) == len(body.messages):  # otherwise tools or calls became messages
                place = body.messages[int(found[1])].place or found[0]
            raise ApiError(place + message[found.end() :], param=place) from None

    def template_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> TemplateChat:
        """Fit messages and tools to the chat template. Raises InvalidRequest."""
        return template_chat(
            self.files,
            [message.model_dump(exclude_none=True) for message in messages],
            [tool.model_dump(exclude_none=True) for tool in tools],
            parse_special=self._parse_special,
        )

    def render(
        self, chat: TemplateChat, variables: Mapping[str, Any], *, generate: bool = True
    ) -> RenderedChat:
        """Return a chat's text, and the answer's reasoning format.

        With `generate`, the text ends with the prompt for an answer, or inside a `begun` one.
        Without a reasoning effort among the variables, those of the setting `think` are added.
        Raises InvalidRequest if the template rejects the messages, and ApiError if it is missing or
        fails.
        """
        if _EFFORT not in variables:
            variables = {**self._thinking, **variables}
        try:
            if generate:
                return render_chat(self.files, chat, variables)
            text = self.files.template.render(
                chat.messages, tools=chat.tools, add_generation_prompt=False, **variables
            )
            return RenderedChat(text, None)
        except ModelError as error:
            reason = str(error).partition(";")[0]
            raise ApiError(f"{reason}; use /v1/completions", param="messages") from error

    def _fitting(self, tokens: list[int]) -> list[int]:
        """Return the tokens, if there is room for an answer."""
        if len(tokens) >= self._max_length:
            raise prompt_too_long(len(tokens), self._max_length)
        return tokens


@contextmanager
def _of_field(field: str) -> Iterator[None]:
    """Convert an InvalidRequest of the body to an ApiError that names the request's field."""
    try:
        yield
    except InvalidRequest as error:
        raise field_error(field, error) from error
