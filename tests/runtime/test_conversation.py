"""Conversations that fill their context, or whose turns fail: their errors and their state.

What a conversation answers while there is room is in `test_conversation_tokens.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline.decoding.types import FinishReason
from paceline.errors import ContextFull, InvalidRequest, ModelError
from paceline.models import ModelFiles
from paceline.runtime.model import Model
from support.plain import said, small
from support.tiny import TEMPLATE

SYSTEM = {"role": "system", "content": "one"}
CACHE = 160
"""Slots of the small cache; the context of the model is longer."""


@pytest.fixture
def chat(tiny_files: ModelFiles, cache: Any) -> Iterator[Any]:
    conversation = small(tiny_files, CACHE).conversation([SYSTEM])
    yield conversation
    conversation.close()


def filled(chat: Any, message: str = "Hello") -> ContextFull:
    for turn in range(30):
        before = [*chat.messages]
        try:
            said(chat.send(f"{message} {turn}", max_tokens=20, ignore_eos=True, drafter="none"))
        except ContextFull as full:
            assert chat.messages == before
            return full
    raise AssertionError("the context never gets full")


def test_a_full_context_error_counts_the_turns_to_drop(chat: Any, model: Model):
    full = filled(chat)
    assert full.tokens >= full.context == chat.context == CACHE
    assert isinstance(full, InvalidRequest)
    before, turns = [*chat.messages], full.turns
    assert turns
    assert 1 <= turns < chat.turns
    dropped = chat.drop_oldest(turns)
    assert dropped == before[1 : 1 + 2 * turns], "whole turns, a message and its answer each"
    assert chat.messages == [SYSTEM, *before[1 + 2 * turns :]]
    messages = [*chat.messages, {"role": "user", "content": "and now"}]
    answer = said(chat.send("and now", max_tokens=20, drafter="none"))
    expected = model.generate(messages, max_tokens=20, drafter="none")
    assert answer.token_ids == expected.token_ids
    assert chat.messages[-2:] == [messages[-1], {"role": "assistant", "content": answer.text}]


def test_dropping_the_suggested_turns_frees_a_quarter_of_the_context(chat: Any):
    filled(chat)
    with pytest.raises(ContextFull) as caught:
        chat.send("Hello 9", ignore_eos=True, drafter="none")
    chat.drop_oldest(caught.value.turns or 0)
    answer = said(chat.send("Hello 9", ignore_eos=True, drafter="none"))
    assert answer.completion_tokens >= CACHE // 4


def test_a_response_that_fills_the_context_ends_with_length_and_is_a_turn(chat: Any):
    found = said(chat.send("Hello", ignore_eos=True, drafter="suffix"))
    assert found.finish_reason == FinishReason.LENGTH
    assert found.prompt_tokens + found.completion_tokens == CACHE
    assert chat.messages[-1] == {"role": "assistant", "content": found.text}
    with pytest.raises(ContextFull) as caught:
        chat.send("more")
    assert caught.value.turns == 1


def test_a_message_that_can_never_fit_suggests_no_turns_to_drop(chat: Any):
    said(chat.send("Hello", max_tokens=5))
    before = [*chat.messages]
    with pytest.raises(ContextFull) as caught:
        chat.send("x " * 300)
    assert caught.value.turns is None
    assert chat.messages == before
    chat.messages, text = [SYSTEM], "x"
    while len(chat.model.tokens([SYSTEM, {"role": "user", "content": text}])) < CACHE - 1:
        text += "x"
    with pytest.raises(ContextFull):
        chat.send(text + "x")
    assert said(chat.send(text, ignore_eos=True)).completion_tokens == 1, "there is room for one"


def test_dropping_turns_drops_their_tool_messages_but_no_system_message(model: Model):
    greeting = {"role": "assistant", "content": "hi"}
    turns: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "b"},
    ]
    late: Any = {"role": "system", "content": "two"}
    last = {"role": "user", "content": "c"}
    chat = model.conversation([SYSTEM, greeting, *turns, late, last, last])
    assert chat.turns == 4
    assert chat.drop_oldest() == [greeting]
    assert chat.drop_oldest() == turns
    assert chat.messages == [SYSTEM, late, last, last], "the same message twice is two turns"
    assert chat.drop_oldest(0) == []
    assert chat.drop_oldest() == [last]
    for count in (2, -1):
        with pytest.raises(InvalidRequest, match="the chat has 1"):
            chat.drop_oldest(count)
    chat.close()


def test_turns_cannot_be_dropped_during_a_response(chat: Any):
    stream = chat.send("Hello", max_tokens=20)
    next(stream)
    with pytest.raises(InvalidRequest, match="has not ended"):
        chat.drop_oldest(0)
    stream.close()


def test_a_response_closed_before_its_first_token_is_not_a_turn(chat: Any):
    chat.send("Hello").close()
    assert chat.messages == [SYSTEM]
    assert said(chat.send("Hello", max_tokens=5)).completion_tokens == 5


BAD_TEMPLATE = "{% if messages[-1]['content'] == 'again' %}{{ 1 // 0 }}{% endif %}" + TEMPLATE


@pytest.mark.parametrize("broken", ["template", "drafter", "first call", "later call"])
def test_a_failed_turn_leaves_the_conversation_unchanged(
    broken: str, model: Model, monkeypatch: pytest.MonkeyPatch
):
    files = replace(model.files, chat_template=BAD_TEMPLATE) if broken == "template" else None
    chat = Model(files or model.files, model.engine).conversation([SYSTEM])
    said(chat.send("Hello", max_tokens=5))
    before, step, calls = [*chat.messages], model.engine.step, 0

    def fails(work: Any, *_: Any) -> Any:
        nonlocal calls
        calls += 1
        if broken != "later call" or calls == 4:
            raise RuntimeError("broken")
        return step(work)

    with monkeypatch.context() as patch:
        if broken == "drafter":
            patch.setattr("paceline.runtime.drafting.drafters.create", fails)
        elif broken != "template":
            patch.setattr(model.engine, "step", fails)
        with pytest.raises(ModelError if broken == "template" else RuntimeError):
            said(chat.send("again", drafter="suffix", max_tokens=20, ignore_eos=True))
    assert chat.messages == before
    messages = [*before, {"role": "user", "content": "and"}]
    answer = said(chat.send("and", max_tokens=20))
    assert answer.token_ids == model.generate(messages, max_tokens=20).token_ids
    chat.close()
