"""One call makes all that the scheduler has to do for a body."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.runtime.model import Model
from paceline.server.body import ChatBody, CompletionBody
from paceline.server.service import Service
from support.server import running

CHAT = {"messages": [{"role": "user", "content": "the quick brown fox"}]}


@pytest.fixture(scope="module")
def service(tiny_model: Model, tiny_cache: Path) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tiny_cache))
        with running(tiny_model.fresh()) as server:
            yield server.server.service


def test_completions_have_n_tickets_for_each_prompt_in_the_order_of_the_prompts(service: Service):
    body = CompletionBody.model_validate({"prompt": ["the", "one and"], "n": 2, "seed": 7})
    tickets = service.prepare(body)
    one, two = (service.scheduler.model.tokens(text, raw=True) for text in ("the", "one and"))
    assert [ticket.tokens for ticket in tickets] == [one, one, two, two]
    assert [ticket.index for ticket in tickets] == [0, 1, 0, 1]
    assert [ticket.request.sampling.seed for ticket in tickets] == [7, 8, 7, 8]
    assert {ticket.request.max_tokens for ticket in tickets} == {16}


def test_a_chats_ticket_has_the_options_of_its_body(service: Service):
    body = ChatBody.model_validate(
        {**CHAT, "temperature": 0.5, "stop": "x", "logprobs": True, "top_logprobs": 3}
    )
    (ticket,) = service.prepare(body)
    request = ticket.request
    assert (request.sampling.temperature, request.stop, request.logprobs) == (0.5, ("x",), 3)
    assert request.max_tokens is None
    assert str(request.drafter) == "suffix", "auto is resolved"
    assert not request.private


def test_a_limit_of_0_computes_the_prompt_alone_and_a_salt_keeps_the_answer_private(
    service: Service,
):
    (prompt_alone,) = service.prepare(ChatBody.model_validate({**CHAT, "max_tokens": 0}))
    assert prompt_alone.prefill_only
    assert prompt_alone.request.private
    (salted,) = service.prepare(ChatBody.model_validate({**CHAT, "cache_salt": "a"}))
    assert (salted.salt, salted.request.private) == ("a", True)
