"""Admission by used KV, preemption, and no useless eviction of the prefix cache."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.drafters import GuardedDrafter
from paceline.engines import EngineSettings, open_engine
from paceline.models import ModelFiles
from paceline.runtime.batching.request import BatchRequest
from paceline.runtime.model import Model
from support.command import served
from support.other_clients import CHAT
from support.scheduling import Submitted
from support.server import HTTP
from support.waiting import PATIENCE, until

PROMPTS = [
    "the rain in the rain in the",
    "one and two and one and two and",
    "this is the one " * 6,
    "th is is all that it is and all that it was",
    "a",
    "all the world and the one",
]


@pytest.fixture(scope="module")
def one_context(tiny_files: ModelFiles, tiny_cache: Path) -> Model:
    """The tiny model with the default cache size: one full context."""
    engine = open_engine(
        "llamacpp", tiny_files.path, tiny_files.context_length, EngineSettings(contexts=1)
    )
    assert engine.free_slots == tiny_files.context_length
    return Model(tiny_files, engine)


@pytest.fixture
def model(one_context: Model, cache: Path) -> Iterator[Model]:
    free = one_context.engine.free_slots
    yield one_context.without_history()
    assert one_context.engine.free_slots == free


def plain(model: Model, asked: Submitted) -> list[int]:
    options = {**asked.options, "drafter": "none"}
    return model.generate(asked.prompt, raw=True, **options).token_ids


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "policy"), [("auto", "auto"), ("suffix+ngram:min=1", "kelly")])
def test_preempted_requests_end_with_the_same_tokens(model: Model, drafter: str, policy: str):
    scheduler = model.open_scheduler()
    asked = [
        Submitted(
            model,
            prompt,
            max_tokens=300,
            ignore_eos=True,
            seed=n,
            temperature=(0.0, 0.7)[n % 2],
            drafter=drafter,
            policy=policy,
            logprobs=2,
        )
        for n, prompt in enumerate(PROMPTS)
    ]
    scheduler.start()
    results = [item.result() for item in asked]
    scheduler.close()
    assert scheduler.load.preempted > 0
    assert scheduler.load.faults == 0
    assert any(computed.stats.preempted for computed in results)
    assert results[0].stats.preempted == 0, "the oldest is never preempted"
    for request, result in zip(asked, results, strict=True):
        assert result.token_ids == plain(model, request)
        assert len(result.logprobs) == len(result.token_ids)
        assert (result.stats.recomputed > 0) == (result.stats.preempted > 0)
    assert "recompute_seconds" in max(results, key=lambda r: r.stats.preempted).stats.as_dict()


def test_a_preempted_request_can_be_cancelled_in_the_queue(model: Model):
    scheduler = model.open_scheduler()
    old, young = (
        Submitted(model, prompt, max_tokens=400, ignore_eos=True) for prompt in PROMPTS[:2]
    )
    preempt = scheduler._preempt

    def cancelling(**which: Any) -> bool:
        done = preempt(**which)
        young.queued.cancel()
        return done

    scheduler._preempt = cancelling  # type: ignore[method-assign]
    scheduler.start()
    assert len(old.result().token_ids) == 400
    cut = young.result()
    scheduler.close()
    assert scheduler.load.preempted == 1
    assert cut.finish_reason == "cancelled"
    assert cut.token_ids == plain(model, young)[: len(cut.token_ids)]


def test_a_rejected_request_evicts_nothing(model: Model):
    scheduler = model.open_scheduler()
    admit, rejected = scheduler.admission.admit, []
    open_prefix, opened = scheduler.prefix_cache.open, []

    def counted(*arguments: Any) -> Any:
        opened.append(arguments)
        return open_prefix(*arguments)

    scheduler.prefix_cache.open = counted  # type: ignore[method-assign]

    def watched(queued: BatchRequest, running: Sequence[BatchRequest]) -> Any:
        before = len(scheduler.prefix_cache)
        cached_prefix = admit(queued, running)
        if cached_prefix is None:
            rejected.append((before, len(scheduler.prefix_cache)))
        return cached_prefix

    scheduler.admission.admit = watched  # type: ignore[method-assign]
    scheduler.start()
    Submitted(model, "this is the one " * 6, max_tokens=4).result()
    assert len(scheduler.prefix_cache) == 1
    # Its prompt needs most of the cache, which it cannot have while the other one runs.
    first = Submitted(model, "the rain", max_tokens=200, ignore_eos=True, drafter="none")
    until(lambda: scheduler.load.running == 1)
    big = Submitted(model, "one and two and " * 38, max_tokens=20, ignore_eos=True)
    assert len(first.result().token_ids) == 200
    assert len(big.result().token_ids) == 20
    scheduler.close()
    assert len(rejected) > 20
    assert set(rejected) == {(1, 1)}
    assert len(opened) < len(rejected), "the prefix cache is queried again without a change"


# -- the draft model's cache -----------------------------------------------------------------------


def test_a_draft_model_without_slots_stops_drafting_and_responses_complete(
    tiny_model: Model, cache: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    # A call may take longer than a second on a busy machine; such a drafter counts as failed.
    monkeypatch.setitem(GuardedDrafter.__init__.__kwdefaults__, "seconds", PATIENCE)
    model = Model(tiny_model.files, tiny_model.engine)
    model.drafting._slots = 1  # as if the target had only one: the draft model then has one context
    drafter = f"model:{tiny_gguf}"
    model.open_drafters(drafter)
    assert model.drafting.slots(drafter) == 512
    scheduler = model.open_scheduler()
    counted = scheduler.admission._fits_drafter
    scheduler.admission._fits_drafter = lambda *_: True  # type: ignore[method-assign]
    asked = [
        Submitted(model, prompt, max_tokens=300, ignore_eos=True, drafter=drafter)
        for prompt in PROMPTS[:4]
    ]
    scheduler.start()
    results = [item.result() for item in asked]
    assert not scheduler.load.failed_drafters
    for request, result in zip(asked, results, strict=True):
        assert result.token_ids == plain(model, request)
    # Normally admission counts the draft model's slots and prevents this.
    other = Submitted(model, PROMPTS[0], max_tokens=3, drafter=drafter)
    other.result()
    for request in (queued := [item.queued for item in asked]):
        request.request = replace(request.request, max_tokens=320 - len(request.tokens))
    assert not counted(other.queued, queued)
    assert counted(other.queued, [])
    scheduler.close()


# -- the end ---------------------------------------------------------------------------------------


def test_shutdown_does_not_drop_a_request_between_queue_and_batch(
    tiny_model: Model, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """`close` runs just after the request has left the queue."""
    model = Model(tiny_model.files, tiny_model.engine)
    scheduler = model.open_scheduler()
    _open_answer = model._open_answer
    closing = threading.Thread(target=scheduler.close, args=(PATIENCE,))

    def slow_open(*arguments: Any, **more: Any) -> Any:
        closing.start()
        closing.join(0.3)  # `close` waits for requests while this one begins
        assert closing.is_alive()
        return _open_answer(*arguments, **more)

    monkeypatch.setattr(model, "_open_answer", slow_open)
    asked = Submitted(model, PROMPTS[0], max_tokens=30, ignore_eos=True)
    scheduler.start()
    assert len(asked.result().token_ids) == 30
    closing.join(PATIENCE)
    assert not scheduler.alive


# -- the shipped defaults --------------------------------------------------------------------------


def gauge(url: str, name: str) -> float:
    lines = HTTP.get(url + "/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))


@pytest.mark.slow
def test_serve_decodes_six_clients_without_max_tokens_by_default(tiny_gguf: Path, cache: Path):
    """All options except the port have their defaults: cache, drafter and admission."""
    with served(tiny_gguf, cache, "--port", "0") as command:
        url = command.url
        assert gauge(url, "paceline_cache_free_slots") == 4 * 512
        most = 0.0

        def ask(number: int) -> int:
            turn = {"role": "user", "content": PROMPTS[number]}
            body = {"messages": [turn], "ignore_eos": True, "temperature": 0}
            response = HTTP.post(url + CHAT, json=body)
            assert response.status_code == 200, response.text
            return int(response.json()["usage"]["completion_tokens"])

        totals: list[int] = []
        for _ in range(20):  # on a busy machine some may end before the last one begins
            threads = [threading.Thread(target=lambda n=n: totals.append(ask(n))) for n in range(6)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                most = max(most, gauge(url, "paceline_requests_running"))
            for thread in threads:
                thread.join(PATIENCE)
            if most == 6:
                break
        assert most == 6
        assert set(totals) == {256}
