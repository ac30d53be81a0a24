"""Prompts as token ids: a chat through its template, text through the tokenizer.

A chat template also decides how the answer's reasoning is marked (`models/templates/marks.py`); the
marks go on to `decoding/reasoning.py`, which divides the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from paceline.decoding.reasoning import ReasoningMarks
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.runtime.request import Request

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}"""

Prompt = str | Sequence[Message] | Sequence[int]
"""A user's message, the messages of a chat, or token ids."""


def encode_prompt(
    files: ModelFiles, prompt: Prompt, request: Request, vocab_size: int
) -> tuple[list[int], Request]:
    """Return the prompt's token ids, and the request with the marks of the reasoning to expect.

    Raises:
        InvalidRequest: an empty prompt, token ids of no vocabulary, messages that the chat template
            refuses, or a template that cannot turn thinking on or off.
        ModelError: the model has no chat template and the prompt needs one.
    """
    tokens, request = _encoded(files, prompt, request)
    least, most = min(tokens, default=0), max(tokens, default=0)
    if least < 0 or most >= vocab_size:
        raise InvalidRequest(
            f"the prompt has the token id {least if least < 0 else most}; expected 0 to "
            f"{vocab_size - 1}, the model's vocabulary"
        )
    return tokens, request


def _encoded(files: ModelFiles, prompt: Prompt, request: Request) -> tuple[list[int], Request]:
    if not prompt:
        raise InvalidRequest("the prompt is empty; expected some text or a message")
    tokenizer = files.tokenizer()
    bare = request.raw if isinstance(prompt, str) else isinstance(prompt[0], int)
    if bare and (request.think is not None or request.template_kwargs):
        raise InvalidRequest(
            "think and template_kwargs are for the chat template; give messages, or leave out "
            "these options and raw"
        )
    if isinstance(prompt, str):
        if request.raw:
            return tokenizer.encode(prompt, special=True), request
        prompt = [{"role": "user", "content": prompt}]
    if all(isinstance(item, int) for item in prompt):
        return list(cast("Sequence[int]", prompt)), request
    control, messages = files.control_text(), cast("Sequence[Message]", prompt)
    variables = dict(request.template_kwargs)
    if not request.parse_special:
        messages, variables = control.guarded_messages(messages), control.guarded(variables)
    if request.think is not None:
        variables = {**files.thinking().switch(request.think), **variables}
    text, thoughts = render_chat(files, messages, variables)
    if request.constraint is None:  # a grammar has no place for reasoning
        request = replace(request, thoughts=thoughts)
    return control.encode(text), request


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

    thoughts = ReasoningMarks(
        form.opens,
        form.closes,
        thinking.tokens_of(form),
        label=form.label,
        wrap=thinking.wrap,
        inside=thinking.inside(text, bare),
        channels=form.channels,
    )
    return RenderedChat(text, thoughts)
