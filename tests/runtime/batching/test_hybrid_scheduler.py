"""Hybrid models under the scheduler: prefixes shared at checkpoints, exact answers."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import StepResult
from paceline.engines.openvino.engine import OpenVinoEngine
from paceline.models import resolve
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.conversation import Conversation
from paceline.runtime.model import Model
from support.scheduling import Submitted
from support.tiny_checkpoints import write_gguf_of

CONTEXT = 512
SYSTEM = "this is the one and the other in the rain, and that is all there is to it; " * 2
QUESTIONS = ("who is it?", "and where?", "when is it then?", "why is it so?")


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5_text"])
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("hybrid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        files = resolve(str(write_gguf_of(request.param, folder / "m.gguf")), folder / "cache")
        settings = EngineSettings(cache_tokens=8 * CONTEXT)
        yield Model(files, open_engine("openvino", files.path, CONTEXT, settings))


@pytest.fixture
def scheduler(hybrid: Model) -> Iterator[Scheduler]:
    """Leaves no KV block and no state block behind."""
    engine = hybrid.engine
    assert isinstance(engine, OpenVinoEngine)
    assert engine._states is not None
    free = engine.free_slots, engine._states.free
    instance = Scheduler(hybrid)
    instance.start()
    yield instance
    instance.close()
    assert (engine.free_slots, engine._states.free) == free


def alone(model: Model, prompt: str, tokens: int) -> list[int]:
    return model.generate(prompt, raw=True, drafter="none", max_tokens=tokens).token_ids


def test_a_prompt_that_comes_again_is_computed_from_its_last_checkpoint(
    hybrid: Model, scheduler: Scheduler
):
    expected = alone(hybrid, SYSTEM, 12)
    for _ in range(3):
        assert Submitted(scheduler, SYSTEM, max_tokens=12).result().token_ids == expected
    count = len(hybrid.tokens(SYSTEM, raw=True))
    assert scheduler.prefix_cache.hit_tokens == 2 * ((count - 1) // 32 * 32) > 0


def test_a_system_prompt_is_shared_from_the_third_request_on(hybrid: Model, scheduler: Scheduler):
    hits = []
    for question in QUESTIONS:
        before = scheduler.prefix_cache.hit_tokens
        result = Submitted(scheduler, SYSTEM + question * 8, max_tokens=8).result()
        assert result.token_ids == alone(hybrid, SYSTEM + question * 8, 8)
        hits.append(scheduler.prefix_cache.hit_tokens - before)
    shared = len(hybrid.tokens(SYSTEM, raw=True)) // 32 * 32
    assert hits[0] == 0
    assert hits[2] >= shared - 32
    assert hits[3] >= shared - 32


def test_answers_of_many_requests_are_those_of_each_alone(
    hybrid: Model, monkeypatch: pytest.MonkeyPatch
):
    # Far too few states for all: they are evicted and computed again.
    monkeypatch.setattr(EngineSettings, "state_blocks", lambda *_: 12)
    settings = EngineSettings(cache_tokens=8 * CONTEXT)
    model = Model(hybrid.files, open_engine("openvino", hybrid.files.path, CONTEXT, settings))
    assert isinstance(model.engine, OpenVinoEngine)
    assert model.engine._states is not None
    assert model.engine.most_sequences == 3
    free = model.engine._states.free
    scheduler = Scheduler(model)
    sequences: list[int] = []
    step = model.engine.step

    def counted(work: Sequence[Any]) -> StepResult:
        result = step(work)  # raises CacheFull if there are too few states
        sequences.append(len(work))
        return result

    monkeypatch.setattr(model.engine, "step", counted)
    scheduler.start()
    picked = random.Random(0)
    drafters = ("none", "suffix", "ngram", "ngram:min=1")
    asked = []
    for number in range(24):
        prompt = SYSTEM[: picked.randrange(20, len(SYSTEM))] + picked.choice(QUESTIONS)
        options = {"policy": "fixed", "max_block": 5, "drafter": drafters[number % 4]}
        asked.append((prompt, Submitted(scheduler, prompt, max_tokens=10, **options)))
    for _, item in asked[::6]:
        item.queued.cancel()
    results = [entry.result() if at % 6 else None for at, (_, entry) in enumerate(asked)]
    scheduler.close()
    assert model.engine._states.free == free
    assert len(sequences) == scheduler.load.calls + 1, "a call failed, and was made again in parts"
    assert max(sequences) == 3
    for (prompt, _), computed in zip(asked, results, strict=True):
        if computed is not None:
            assert computed.token_ids == alone(hybrid, prompt, 10)


def test_preempted_answers_go_on_to_the_same_tokens(hybrid: Model):
    settings = EngineSettings(cache_tokens=352)
    engine = open_engine("openvino", hybrid.files.path, CONTEXT, settings)
    model = Model(hybrid.files, engine)
    scheduler = Scheduler(model)
    options = {"max_tokens": 160, "min_tokens": 160, "temperature": 1.0, "seed": 3}
    prompts = [question * 2 for question in QUESTIONS[:3]]
    asked = [Submitted(scheduler, prompt, **options) for prompt in prompts]
    scheduler.start()  # with all of them: one that came late would find the cache free
    results = [request.result() for request in asked]
    scheduler.close()
    assert scheduler.load.preempted > 0
    for prompt, result in zip(prompts, results, strict=True):
        expected = hybrid.generate(prompt, raw=True, drafter="none", **options)
        assert result.token_ids == expected.token_ids


def test_turns_of_a_chat_are_answered_as_if_all_were_read_anew(hybrid: Model):
    chat = Conversation(hybrid)
    for question in QUESTIONS[:3]:
        asked = [*chat.messages, {"role": "user", "content": question}]
        stream = chat.say(question, max_tokens=20, seed=1)
        for _ in stream:
            pass
        again = hybrid.generate(asked, max_tokens=20, seed=1, drafter="none")
        assert stream.result.token_ids == again.token_ids
    chat.close()
