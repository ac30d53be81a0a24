"""Concurrent responses of one model: lists of prompts, threads and coroutines."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.decoding.types import FinishReason
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.models.published import Installed
from paceline.options import Options
from paceline.runtime import model as model_module
from paceline.runtime.batching.request import Draining
from paceline.runtime.model import Model
from paceline.runtime.stream import MAX_UNREAD
from support.other_clients import slowed
from support.plain import PROMPT, PROMPTS, SAMPLED, plain, small
from support.scheduling import free_slots
from support.waiting import PATIENCE, until

MANY = [f"{prompt} {number}" for number in range(2) for prompt in PROMPTS]
WAYS: list[Options] = [{"drafter": "suffix"}, {**SAMPLED, "stop": "T"}]


def alone(model: Model, prompt: Any, **options: Any) -> list[int]:
    return plain(model.without_history(), prompt, **{**options, "drafter": "none"}).token_ids


@pytest.fixture
def sizes(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    step, counts = model.engine.step, list[int]()

    def counting(work: Any) -> Any:
        counts.append(len(work))
        return step(work)

    monkeypatch.setattr(model.engine, "step", counting)
    return counts


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_list_of_prompts_gets_the_responses_of_each_alone_in_order(
    way: Options, model: Model, sizes: list[int]
):
    options: Any = {"max_tokens": 15, **way}
    model.exactness_report()  # measures the engine's rows, once
    sizes.clear()
    results = model.generate(MANY, **options)
    assert max(sizes) > len(MANY) // 2
    calls = len(sizes)
    assert [result.token_ids for result in results] == [
        alone(model, prompt, **options) for prompt in MANY
    ]
    sizes.clear()
    texts = [model.generate(prompt, **options).text for prompt in MANY]
    assert len(sizes) > 3 * calls
    assert [result.text for result in results] == texts


def test_lists_of_chats_or_token_ids_are_batches_but_a_message_list_is_not(model: Model):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    token_ids = [model.tokens(prompt) for prompt in PROMPTS]
    expected = [alone(model, prompt, max_tokens=5) for prompt in PROMPTS]
    for batch in (chats, token_ids, [PROMPTS[0], *chats[1:]]):
        results = model.generate(batch, max_tokens=5)
        assert [result.token_ids for result in results] == expected
    assert model.generate(chats[0], max_tokens=5).token_ids == expected[0]
    assert model.generate(token_ids[0], max_tokens=5).token_ids == expected[0]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (["a", {"role": "user", "content": "b"}], ["messages", "strings"]),
        (["a", 1], ["strings", "token ids"]),
        (["a", None], ["item 1", "NoneType"]),
        (7, ["int"]),
        (["a", ""], ["prompt 1", "empty"]),
        (["a", "far too long " * 2000], ["prompt 1", "context"]),
        ([], ["empty"]),
    ],
)
def test_a_list_of_mixed_kinds_is_rejected_by_name(prompt: Any, named: list[str], model: Model):
    with pytest.raises(InvalidRequest) as error:
        model.generate(prompt)
    assert all(name in str(error.value) for name in named), error.value


def test_an_invalid_option_is_not_blamed_on_a_prompt(model: Model):
    with pytest.raises(InvalidRequest) as error:
        model.generate(PROMPTS, top_k=-1)
    assert "top_k" in str(error.value)
    assert "prompt" not in str(error.value)


@pytest.mark.parametrize(
    ("ask", "prompt"), [(Model.stream, PROMPTS), (Model.tokens, PROMPTS), (Model.map, "one")]
)
def test_single_prompt_methods_reject_lists_and_map_rejects_a_single_prompt(
    ask: Any, prompt: Any, model: Model
):
    with pytest.raises(InvalidRequest):
        ask(model, prompt)


def test_map_yields_responses_as_they_complete_and_reads_prompts_lazily(model: Model):
    read = list[int]()

    def prompts() -> Iterator[str]:
        for number in range(150):
            read.append(number)
            yield f"a {number}"

    answers = model.as_completed(prompts(), max_tokens=1)
    first = next(answers)
    assert len(read) < 150
    results = dict([first, *answers])
    assert sorted(results) == [*range(150)]
    for number in (0, 149):
        assert results[number].token_ids == alone(model, f"a {number}", max_tokens=1)


def test_options_and_published_drafters_are_checked_once_for_all_prompts(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    counts = Counter[str]()

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counting(*arguments: Any, **more: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **more)

        monkeypatch.setattr(module, name, counting)

    counted(model_module, "check")
    counted(Installed, "_fitting")
    results = model.generate(PROMPTS, max_tokens=3, temperature=1.0)
    assert len({result.seed for result in results}) == len(PROMPTS), "each draws its own seed"
    assert dict(model.as_completed(PROMPTS, max_tokens=3)).keys() == {*range(len(PROMPTS))}
    assert counts == {"check": 2, "_fitting": 1}


def test_leaving_map_early_or_an_error_of_a_prompt_ends_the_other_responses(model: Model):
    free = model.engine.free_slots
    for _ in model.as_completed(MANY, max_tokens=40, ignore_eos=True):
        break
    until(lambda: free_slots(model) == free)
    assert plain(model, PROMPT).token_ids
    with pytest.raises(InvalidRequest):
        list(model.as_completed([*PROMPTS, "far too long " * 2000], max_tokens=40, ignore_eos=True))
    until(lambda: free_slots(model) == free)


def test_threads_get_the_responses_of_each_request_alone(model: Model):
    expected = [alone(model, prompt, max_tokens=20) for prompt in MANY]
    answers = dict[int, list[int]]()

    def ask(number: int) -> None:
        prompt = MANY[number]
        if number % 3 == 0:
            answers[number] = model.generate(prompt, max_tokens=20).token_ids
        elif number % 3 == 1:
            with model.stream(prompt, max_tokens=20) as stream:
                answers[number] = [token for step in stream for token in step.tokens]
        else:
            (result,) = model.generate([prompt], max_tokens=20)
            answers[number] = result.token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(MANY))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [answers.get(number) for number in range(len(MANY))] == expected


def test_coroutines_share_forward_passes_and_get_the_responses_of_each_alone(
    model: Model, sizes: list[int]
):
    async def ask() -> list[list[int]]:
        answers = await asyncio.gather(
            *(model.agenerate(prompt, max_tokens=30) for prompt in PROMPTS)
        )
        more = await model.agenerate(PROMPTS, max_tokens=30)
        return [answer.token_ids for answer in (*answers, *more)]

    answers = asyncio.run(ask())
    assert max(sizes) >= len(PROMPTS) // 2
    expected = [alone(model, prompt, max_tokens=30) for prompt in PROMPTS]
    assert answers == expected * 2


def test_async_stream_steps_add_up_to_the_response(model: Model):
    async def ask() -> None:
        stream = model.astream(PROMPT, max_tokens=20)
        with pytest.raises(RuntimeError):
            _ = stream.result
        steps = [step async for step in stream]
        expected = plain(model, PROMPT, max_tokens=20)
        assert [token for step in steps for token in step.tokens] == expected.token_ids
        assert stream.result.text == expected.text

    asyncio.run(ask())


def test_errors_propagate_to_the_coroutine(model: Model):
    free = model.engine.free_slots

    async def ask(prompt: Any, **options: Any) -> None:
        await model.agenerate(prompt, **options)

    for prompt, options in ((PROMPT, {"top_k": -1}), ([PROMPT, ""], {}), ("long " * 2000, {})):
        with pytest.raises(InvalidRequest):
            asyncio.run(ask(prompt, **options))
    until(lambda: free_slots(model) == free)


def test_cancelling_a_coroutine_ends_its_response(model: Model, sizes: list[int]):
    model.exactness_report()  # measures the engine's rows, once
    sizes.clear()
    free, kept = free_slots(model), list[Any]()

    async def leave() -> None:
        async with model.astream(PROMPT, max_tokens=400, ignore_eos=True) as stream:
            async for _ in stream:
                break
        kept.append(model.astream(PROMPT, max_tokens=400, ignore_eos=True))
        task = asyncio.ensure_future(kept[0].finish())
        with model._guard:  # in another thread it is being submitted
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with slowed(model):
        asyncio.run(leave())
        until(lambda: not model.scheduler.unfinished and free_slots(model) == free)
    assert len(sizes) < 100


def test_dropping_a_stream_ends_it_and_frees_its_slots(model: Model):
    free = model.engine.free_slots
    stream = model.stream(PROMPT, max_tokens=400, ignore_eos=True)
    next(stream)
    del stream
    until(lambda: not model.scheduler.unfinished and free_slots(model) == free)


def test_interleaved_streams_advance_together_and_an_unread_one_blocks_none(
    model: Model, sizes: list[int]
):
    options: Any = {"max_tokens": 40, "ignore_eos": True, "drafter": "none"}
    expected = [alone(model, prompt, **options) for prompt in PROMPTS[:3]]
    unread, *streams = [model.stream(prompt, **options) for prompt in PROMPTS[:3]]
    sizes.clear()
    read: list[list[int]] = [[], []]
    for steps in zip(*streams, strict=True):
        for tokens, step in zip(read, steps, strict=True):
            tokens.extend(step.tokens)
    assert read == expected[1:]
    assert sizes.count(2) > 20, "two of them share calls"
    assert unread._events.qsize() <= MAX_UNREAD + 1
    assert [token for step in unread for token in step.tokens] == expected[0]


@pytest.fixture
def own_model(tiny_files: ModelFiles, cache: Path) -> Model:
    return small(tiny_files, 512)


def test_a_closed_model_rejects_every_call_and_ends_its_streams(own_model: Model):
    chat = own_model.conversation()
    with own_model as model:
        stream = model.stream(PROMPT, max_tokens=50, ignore_eos=True)
        next(stream)
        model.generate(PROMPTS, max_tokens=3)
    for _ in stream:
        pass
    assert stream.result.finish_reason == FinishReason.CANCELLED
    uses = (
        lambda: model.generate(PROMPT),
        lambda: model.generate(PROMPTS),
        lambda: model.stream(PROMPT),
        lambda: model.embed("a"),
        lambda: model.conversation().say("a"),
        lambda: chat.send("a"),
        model.measured_costs,
        lambda: model.detokenize([1]),
    )
    for use in uses:
        with pytest.raises(InvalidRequest):
            use()
    chat.close()
    model.close()
    assert "closed" in repr(model)


def test_closing_a_model_ends_batched_responses_with_an_error(own_model: Model):
    answers = own_model.as_completed(MANY, max_tokens=100, ignore_eos=True)
    next(answers)
    own_model.close()
    with pytest.raises(Draining):
        list(answers)


def test_a_repr_is_one_short_line(model: Model):
    with model.stream(PROMPT, max_tokens=200, ignore_eos=True) as stream:
        next(stream)
        chat = model.conversation([{"role": "user", "content": "a"}])
        shown = [repr(value) for value in (model, stream, chat)]
        chat.close()
    shown += [repr(stream), repr(stream.result), repr(stream.result.stats)]
    assert all(len(line) < 250 and "\n" not in line for line in shown), shown
