"""Prompts as token ids: a chat through its template (`chat.py`), text through the tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.runtime.chat import Message, render_chat, template_chat
from paceline.runtime.request import Request

Prompt = str | Sequence[Message] | Sequence[int]
"""A user's message, the messages of a chat, or token ids."""

Prompts = list[str] | list[list[Message]] | list[list[int]] | list[Prompt]
"""Several prompts, which are answered together."""

_SYSTEM = ("system", "developer")
"""Roles of a system message."""


def batch_of(prompt: Prompt | Prompts) -> list[Prompt] | None:
    """Return the prompts of a list of prompts; None for a single prompt.

    A list of strings, or of lists, is a batch. A list of messages, or of token ids, is one prompt.

    Raises InvalidRequest for what is no prompt, and for a list that is of no one kind.
    """
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest(f"the prompt is of type {type(prompt).__name__}; expected {_EXPECTED}")
    kinds = [_kind(item) for item in prompt]
    if "" in kinds:
        wrong = prompt[kinds.index("")]
        raise InvalidRequest(
            f"item {kinds.index('')} of the prompt is of type {type(wrong).__name__}; expected "
            f"{_EXPECTED}"
        )
    distinct = {*kinds}
    if distinct and distinct <= _OF_BATCH:
        return list(cast("Sequence[Prompt]", prompt))
    if len(distinct) > 1:
        raise InvalidRequest(
            f"the prompt is a list of {' and '.join(sorted(distinct))}; a list of strings is a "
            "batch, and a list of messages is one chat: give one of them"
        )
    return None


_OF_BATCH = {"strings", "lists"}
_EXPECTED = "a string, messages, token ids, or a list of these"


def _kind(item: object) -> str:
    """Return what a list with this item is a list of; empty: of nothing that is known."""
    match item:
        case str():
            return "strings"
        case list() | tuple():
            return "lists"
        case Mapping():
            return "messages"
        case bool():
            return ""
        case int():
            return "token ids"
    return ""


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
    check_ids("the prompt", tokens, vocab_size)
    return tokens, request


def prompt_length(files: ModelFiles, prompt: Prompt, request: Request) -> int:
    """Return the tokens of a prompt, of a model that is not open. Raises as `encode_prompt`."""
    return len(_encoded(files, prompt, request)[0])


def check_ids(what: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest, which names `what`, for a token id of no vocabulary."""
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{what} has the token id {token}; expected 0 to {vocab_size - 1}, the model's "
                "vocabulary"
            )


def _encoded(files: ModelFiles, prompt: Prompt, request: Request) -> tuple[list[int], Request]:
    if batch_of(prompt) is not None:
        raise InvalidRequest(
            f"this is a list of {len(prompt)} prompts; give one, or use generate or map"
        )
    if not prompt:
        raise InvalidRequest("the prompt is empty; expected some text or a message")
    tokenizer = files.tokenizer()
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
    messages, _ = template_chat(files, messages, parse_special=request.parse_special)
    control, variables = files.control_text(), dict(request.template_kwargs)
    if not request.parse_special:
        variables = control.guarded(variables)
    if request.think is not None:
        variables = {**files.thinking().switch(request.think), **variables}
    text, thoughts = render_chat(files, messages, variables)
    if request.constraint is None:  # a grammar has no place for reasoning
        request = replace(request, thoughts=thoughts)
    return control.encode(text), request


def _with_system(messages: Sequence[Message], system: str) -> Sequence[Message]:
    if any(message.get("role") in _SYSTEM for message in messages):
        raise InvalidRequest(
            "system is given, and the messages have a system message; leave out one of them"
        )
    return [{"role": "system", "content": system}, *messages]
