"""One scheduler per model: prompt reuse, Ctrl-C, a clean end."""

import _thread
import asyncio
import contextlib
import gc
import itertools
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.options import Options
from paceline.runtime.conversation import Conversation
from paceline.runtime.model import Model
from paceline.runtime.stream import Stream
from support.plain import PROMPT, small
from support.process import python
from support.scheduling import end_scheduler, free_slots
from support.waiting import PATIENCE, until

DOCUMENT = [5, 6, 7, 8, 9] * 60
LONG: Options = {"max_tokens": 400, "ignore_eos": True, "drafter": "none"}


def test_a_second_question_about_a_document_computes_only_the_rest(model: Model):
    options: Options = {"max_tokens": 12, "logprobs": 3, "ignore_eos": True}
    first = model.generate([*DOCUMENT, 10, 11], **options)
    second = model.generate([*DOCUMENT, 12, 13, 14], **options)
    (listed,) = model.generate([[*DOCUMENT, 12, 13, 14]], **options)
    uncached = model.without_history().generate([*DOCUMENT, 12, 13, 14], **options)
    assert [first.stats.cached_tokens, uncached.stats.cached_tokens] == [0, 0]
    block = model.engine.block_size
    assert len(DOCUMENT) // block * block <= second.stats.cached_tokens <= len(DOCUMENT)
    assert listed.stats.cached_tokens >= second.stats.cached_tokens
    assert second.logprobs == listed.logprobs == uncached.logprobs
    assert second.exact
    assert "prefix_cache" in second.exactness


@pytest.mark.parametrize("way", ["stream", "generate", "list"])
def test_ctrl_c_leaves_a_partial_response_and_a_usable_model(way: str, model: Model):
    free = model.engine.free_slots
    started = threading.Event()

    def interrupt() -> None:
        started.wait(PATIENCE)
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    read = list[int]()
    stream: Any = None
    with pytest.raises(KeyboardInterrupt):
        if way == "stream":
            stream = model.stream(PROMPT, **LONG)
            for step in stream:
                read += step.tokens
                started.set()
        else:
            submit = model._submit

            def submitted(*arguments: Any) -> Any:
                queued = submit(*arguments)
                started.set()
                return queued

            model._submit = submitted  # type: ignore[method-assign]
            model.generate(PROMPT if way == "generate" else [PROMPT] * 3, **LONG)
    if stream is not None:
        stream.close()
        assert stream.result.finish_reason == "cancelled"
        assert stream.result.token_ids[: len(read)] == read
    until(lambda: not model.scheduler.unfinished and free_slots(model) == free)
    expected = model.without_history().generate(PROMPT, max_tokens=20).token_ids
    assert model.generate(PROMPT, max_tokens=20).token_ids == expected


class Interrupt:
    """A profiler that raises at one of the places where Python handles signals.

    These are the end of a call of C code, and the entry of a function.
    """

    def __init__(self, place: int) -> None:
        self.left, self.place = place, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event in ("c_return", "call") and path.stem in ("stream", "scheduler", "threading"):
            self.left -= 1
            if not self.left:
                sys.setprofile(None)
                self.place = f"{path.name}:{frame.f_lineno}"
                raise KeyboardInterrupt


@pytest.mark.parametrize("way", ["say", "list", "call"])
def test_ctrl_c_at_any_point_of_a_request_blocks_nothing(way: str, model: Model):
    short: Options = {"max_tokens": 2, "ignore_eos": True, "drafter": "none"}
    expected = model.without_history().generate(PROMPT, **short).token_ids
    kept: list[tuple[Conversation, Stream]] = []

    def ask() -> None:
        if way == "call":
            model.call(lambda: None)
        elif way == "list":
            model.generate([PROMPT], **short)
        else:
            chat = model.conversation()
            kept[:] = [(chat, chat.send("Hello", **short))]
            for _ in kept[0][1]:
                pass

    for place in itertools.count(1):
        interrupt = Interrupt(place)
        sys.setprofile(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            ask()
        sys.setprofile(None)
        if not interrupt.place:
            break
        for chat, stream in kept:
            stream.close()
            assert len(chat.messages) == 2 * bool(stream.result.token_ids), interrupt.place
        kept.clear()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(model.generate, PROMPT, **short)
            assert answer.result(PATIENCE).token_ids == expected, interrupt.place
        until(lambda: not model.scheduler.unfinished)
    assert place > 10


def test_closing_a_stream_read_by_another_thread_ends_both(model: Model):
    for _ in range(2):
        stream = model.stream(PROMPT, **LONG)
        next(stream)
        with ThreadPoolExecutor() as pool:
            reader = pool.submit(list, stream)
            stream.close()
            reader.result(PATIENCE)
        assert stream.result.finish_reason == "cancelled"


def test_a_stream_ends_if_its_model_closes_before_it_starts(tiny_files: ModelFiles, cache: Path):
    model = small(tiny_files, 512)
    begun, go_on = threading.Event(), threading.Event()

    def occupy() -> None:
        begun.set()
        go_on.wait(PATIENCE)

    with ThreadPoolExecutor() as pool:
        pool.submit(model.call, occupy)
        begun.wait(PATIENCE)
        stream = model.stream(PROMPT, **LONG)
        closing = pool.submit(model.close)
        until(lambda: stream._queued.cancelled)
        go_on.set()
        closing.result(PATIENCE)
    assert [*stream] == []
    assert stream.result.finish_reason == "cancelled"


def test_a_replaced_scheduler_is_freed(model: Model):
    model.generate(PROMPT, max_tokens=2)
    first = weakref.ref(model.scheduler)
    end_scheduler(model)
    model.generate(PROMPT, max_tokens=2)
    gc.collect()
    assert first() is None, "it has an engine, which may be another one"


def test_a_rejected_async_stream_has_ended(model: Model):
    async def ask() -> None:
        stream = model.astream(PROMPT, max_tokens=-1)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="max_tokens"):
                await asyncio.wait_for(stream.finish(), PATIENCE)

    asyncio.run(ask())


def test_closing_a_model_again_after_ctrl_c_waits_for_the_forward_pass(
    tiny_files: ModelFiles, cache: Path
):
    model = small(tiny_files, 512)
    scheduler, returned = model.scheduler, list[bool]()
    begun, go_on = threading.Event(), threading.Event()

    def occupy() -> None:
        begun.set()
        until(lambda: scheduler._stopped)  # `close` waits
        _thread.interrupt_main()
        go_on.wait(PATIENCE)
        returned.append(True)

    threading.Thread(target=model.call, args=[occupy]).start()
    begun.wait(PATIENCE)
    with pytest.raises(KeyboardInterrupt):
        model.close()
    threading.Timer(0.2, go_on.set).start()
    model.close()
    assert returned


def test_dropping_a_model_ends_its_thread(tiny_files: ModelFiles, cache: Path):
    model = small(tiny_files, 512)
    stream = model.stream(PROMPT, **LONG)
    next(stream)
    thread, gone = model.scheduler._thread, weakref.ref(model)
    del model
    assert gone() is not None, "a stream needs its model"
    del stream
    gc.collect()
    until(lambda: not thread.is_alive())
    assert gone() is None


def test_an_unread_async_stream_is_paused(model: Model):
    async def ask() -> list[int]:
        stream = model.astream(PROMPT, **LONG)
        read = (await anext(stream)).tokens
        load = model.scheduler.load
        while True:  # until it no longer advances
            calls = load.calls
            await asyncio.sleep(0.2)
            if load.calls == calls:
                break
        assert calls < 200, "of 400 tokens"
        async for step in stream:
            read += step.tokens
        return [*read]

    assert asyncio.run(ask()) == model.without_history().generate(PROMPT, **LONG).token_ids


ENDS = """
import sys, threading, time
import paceline
model = paceline.load(sys.argv[1])
stream = model.stream("a", max_tokens=400, ignore_eos=True, drafter="none")
next(stream)
threading.Thread(target=lambda: model.generate("b", max_tokens=400), daemon=True).start()
while model.scheduler.unfinished < 2:
    time.sleep(0.01)
print("end")
"""


def test_a_process_exits_cleanly_during_responses(tiny_gguf: Path, cache: Path):
    done = python("-c", ENDS, tiny_gguf)
    assert done.stdout.strip() == "end"
    assert "Traceback" not in done.stderr
