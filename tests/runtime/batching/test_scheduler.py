"""Concurrent requests get the responses of each request alone, and leak no slot."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from paceline.errors import InvalidRequest
from paceline.runtime.batching import scheduler as scheduler_module
from paceline.runtime.batching.request import Draining
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.model import Model
from support.errors import raises
from support.scheduling import Submitted
from support.waiting import until

PROMPTS = [
    "the rain in the rain in the",
    "one and two and one and two and",
    "a",
    "this is the one " * 12,
    "th is is all that it is and all that it was",
]


@pytest.fixture
def scheduler(model: Model) -> Iterator[Scheduler]:
    instance = model.open_scheduler()
    instance.start()
    yield instance
    instance.close()
    assert not instance.alive


def options_of(number: int) -> dict[str, Any]:
    """Varied options: greedy and sampled, plain and drafted."""
    chosen: dict[str, Any] = {"max_tokens": 4 + number % 17, "seed": number}
    if number % 3:
        chosen["temperature"] = 0.4 + number % 5 / 4
    chosen["drafter"] = ("auto", "none", "ngram:min=1", "suffix", "ngram")[number % 5]
    if number % 4 == 1:
        chosen["policy"], chosen["max_block"] = "fixed", 5
    return chosen


def alone(model: Model, prompt: str, options: dict[str, Any]) -> list[int]:
    return model.generate(prompt, raw=True, **{**options, "drafter": "none"}).token_ids


def test_batched_responses_match_each_request_alone(model: Model, scheduler: Scheduler):
    picked, free = random.Random(0), model.engine.free_slots
    asked = []
    for number in range(60):
        prompt = picked.choice(PROMPTS)
        asked.append((prompt, options_of(number), Submitted(model, prompt, **options_of(number))))
    for _, _, item in asked[::7]:
        item.queued.cancel()
    results = [entry.result() if at % 7 else None for at, (_, _, entry) in enumerate(asked)]
    scheduler.close(grace=10)
    assert model.engine.free_slots == free
    for (prompt, options, item), result in zip(asked, results, strict=True):
        if result is not None:
            assert result.token_ids == alone(model, prompt, options), options
            assert item.streamed == result.token_ids
            assert item.text == result.text
    assert scheduler.load.calls < sum(r.stats.steps for r in results if r is not None)


@pytest.mark.parametrize("salt", ["", "mine"])
def test_concurrent_requests_share_one_prefill_of_their_prompt(model: Model, salt: str):
    prompt = "this is the one " * 20
    with closing(model.open_scheduler()) as scheduler:
        asked = [
            Submitted(model, prompt, max_tokens=30, temperature=0.8, seed=n, salt=salt)
            for n in range(4)
        ]
        other = Submitted(model, "one and two and " * 20, max_tokens=5, salt=salt)
        scheduler.start()
        results = [item.result() for item in asked]
        other.result()
        hits = scheduler.prefix_cache.hit_tokens
    size, length = model.engine.block_size, results[0].prompt_tokens
    first, *others = [outcome.stats.cached_tokens for outcome in results]
    assert first == 0
    assert len({*others}) == 1
    assert (length - 1) // size * size <= others[0] < length, "whole blocks, or copies of slots"
    assert hits == sum(others)
    for request, result in zip(asked, results, strict=True):
        assert result.token_ids == alone(model, prompt, request.options)


@pytest.mark.parametrize("apart", [{"salt": "b"}, {"cached": False}])
@pytest.mark.usefixtures("scheduler")
def test_salts_and_uncached_requests_share_no_prefix(model: Model, apart: dict[str, Any]):
    prompt = "this is the one " * 20
    Submitted(model, prompt, max_tokens=3, salt="a").result()
    other = Submitted(model, prompt, max_tokens=3, **apart)
    assert other.result().stats.cached_tokens == 0
    same = Submitted(model, prompt, max_tokens=3, salt="a")
    assert same.result().stats.cached_tokens > 0


@pytest.mark.usefixtures("scheduler")
def test_prompt_logprobs_disable_the_prefix_cache(model: Model):
    prompt = "this is the one " * 20
    for _ in range(2):
        result = Submitted(model, prompt, max_tokens=2, logprobs=1, prompt_logprobs=True).result()
        assert result.stats.cached_tokens == 0
        assert len(result.prompt_logprobs) == result.prompt_tokens
        assert len(result.logprobs) == 2


def test_a_fully_cached_prompt_recomputes_its_last_token(model: Model, scheduler: Scheduler):
    """The last token is recomputed, even at the end of a KV block."""
    size = model.engine.block_size
    tokens = model.tokens("this is the one and only " * 30, raw=True)
    for length in (3, size - 1, size, size + 1, 2 * size):
        prompt = tokens[:length]
        expected = model.generate(prompt, max_tokens=6, drafter="none").token_ids
        for _ in range(3):
            asked = Submitted(model, prompt, max_tokens=6)
            assert asked.result().token_ids == expected


def test_the_prefix_cache_is_evicted_to_admit_requests(model: Model):
    total = model.engine.free_slots
    with closing(model.open_scheduler()) as scheduler:
        scheduler.start()
        for number in range(40):
            prompt = f"{number} " + "this is the one and only " * 12
            Submitted(model, prompt, max_tokens=60).result()
        assert 2 < len(scheduler.prefix_cache) < 40
        assert model.engine.free_slots < total
    assert model.engine.free_slots == total


def test_the_engine_idles_once_after_each_busy_period(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    rests: list[int] = []
    monkeypatch.setattr(scheduler_module, "_REST_SECONDS", 0.02)
    monkeypatch.setattr(model.engine, "rest", lambda: rests.append(scheduler.load.calls))
    scheduler = model.open_scheduler()
    scheduler.start()
    try:
        for _ in range(2):
            assert Submitted(model, PROMPTS[0]).result()
            until(lambda: rests[-1:] == [scheduler.load.calls])
        count = len(rests)
        time.sleep(0.1)
        assert len(rests) == count
    finally:
        scheduler.close()


class Stuck:
    """A constraint with a method that fails in the middle of a response."""

    def __init__(self, where: str) -> None:
        self.where, self.tokens = where, 0

    def come(self, where: str) -> None:
        if (where, self.tokens) == (self.where, 3):
            raise InvalidRequest("stuck")

    def masked(self, logits: np.ndarray) -> np.ndarray:
        self.come("masked")
        return logits

    def push(self, token: int) -> None:
        self.tokens += 1
        self.come("push")

    def forced(self, limit: int) -> list[int]:
        self.come("forced")
        return []

    def allowed_length(self, tokens: Sequence[int]) -> int:
        return len(tokens)


@pytest.mark.parametrize("where", ["masked", "push", "forced"])
def test_a_failing_constraint_ends_only_its_own_response(
    model: Model, scheduler: Scheduler, where: str
):
    stuck = Submitted(model, "the one", max_tokens=12, constraint=Stuck(where), ignore_eos=True)
    other = Submitted(model, "this is", max_tokens=12)
    with raises(InvalidRequest, "stuck"):
        stuck.result()
    assert other.result().token_ids == alone(model, "this is", {"max_tokens": 12})
    assert scheduler.load.failed == 1


@pytest.mark.parametrize(
    ("prompt", "options", "value"),
    [("this is the one " * 400, {}, "512"), ("a", {"drafter": "dflash:x"}, "drafter x not found")],
)
def test_a_request_that_can_never_be_served_is_rejected_immediately(
    model: Model, scheduler: Scheduler, prompt: str, options: dict[str, Any], value: str
):
    with raises(Exception, value):
        Submitted(model, prompt, **options)
    assert scheduler.load.waiting == 0


@pytest.mark.usefixtures("scheduler")
def test_a_request_that_cannot_start_fails_alone(model: Model):
    # The tiny model has no table, which shows when its drafters are made.
    with pytest.raises(InvalidRequest):
        Submitted(model, "a", drafter="table", max_tokens=3).result()
    assert Submitted(model, "a", max_tokens=3).result().token_ids


def test_close_finishes_requests_within_the_grace_period(model: Model):
    scheduler = model.open_scheduler()
    scheduler.start()
    asked = [Submitted(model, prompt, max_tokens=20, ignore_eos=True) for prompt in PROMPTS]
    scheduler.close(grace=30)
    assert [len(request.result().token_ids) for request in asked] == [20] * len(asked)
    with pytest.raises(Draining):
        scheduler.submit(asked[0].queued, print)


def test_a_long_prefill_does_not_delay_decoding_requests(
    model: Model, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
):
    writing = Submitted(model, "a", max_tokens=60, ignore_eos=True, drafter="none")
    until(lambda: scheduler.load.running == 1)
    lengths, step = list[int](), model.engine.step

    def watched(work: Any) -> Any:
        lengths.extend(len(block.tokens) for _, block in work if block.prefill)
        return step(work)

    monkeypatch.setattr(model.engine, "step", watched)
    reading = Submitted(model, "this is the one " * 24, max_tokens=4)
    assert len(reading.result().token_ids) <= 4
    writing.result()
    assert 0 < max(lengths) <= 512
