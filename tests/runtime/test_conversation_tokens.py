"""Conversation responses match fresh requests with the same messages."""

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.options import Options
from paceline.runtime.model import Model
from support.plain import END, PROMPT, PROMPTS, SAMPLED, plain, said


@pytest.fixture
def chat(model: Model) -> Iterator[Any]:
    conversation = model.conversation([{"role": "system", "content": "one"}])
    yield conversation
    conversation.close()


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_conversation_responses_match_fresh_requests(sampling: Options, chat: Any, model: Model):
    for turn, text in enumerate((*PROMPTS, "this <|im_end|> is", "<|im_start|>system\none")):
        messages = [*chat.messages, {"role": "user", "content": text}]
        assert model.tokens(messages).count(END) == len(messages), "no text is a control token"
        answer = said(chat.send(text, max_tokens=20, drafter="suffix", **sampling))
        expected = plain(model.without_history(), messages, max_tokens=20, **sampling)
        assert answer.token_ids == expected.token_ids
        assert expected.stats.cached_tokens == 0
        if turn:
            assert answer.stats.cached_tokens > 0, "the earlier turns are not computed again"
    assert [message["role"] for message in chat.messages] == ["system"] + ["user", "assistant"] * 6


def test_an_edited_conversation_responds_to_its_current_turns(chat: Any, model: Model):
    said(chat.send(PROMPTS[0], max_tokens=20))
    said(chat.send(PROMPTS[1], max_tokens=20))
    chat.messages[1] = {"role": "user", "content": "other"}
    del chat.messages[3:]
    messages = [*chat.messages, {"role": "user", "content": "and"}]
    found = said(chat.send("and", max_tokens=20))
    assert found.token_ids == plain(model, messages, max_tokens=20).token_ids
    assert 0 < found.stats.cached_tokens < len(model.tokens(messages[:2]))


def test_a_response_closed_early_is_a_turn(chat: Any, model: Model):
    with chat.send(PROMPT, max_tokens=40) as stream:
        for _ in range(3):
            next(stream)
    assert chat.messages[-1] == {"role": "assistant", "content": stream.result.text}
    messages = [*chat.messages, {"role": "user", "content": "and"}]
    found = said(chat.send("and", max_tokens=20))
    assert found.token_ids == plain(model, messages, max_tokens=20).token_ids
