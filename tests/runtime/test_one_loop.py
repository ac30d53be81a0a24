"""What one scheduler per model gives a program: reuse of prompts, Ctrl-C, a clean end."""

import _thread
import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from paceline.models import ModelFiles
from paceline.options import Options
from paceline.runtime.batching import scheduler as scheduler_module
from paceline.runtime.model import Model
from support.plain import PROMPT, small
from support.scheduling import free_slots
from support.waiting import PATIENCE, until

DOCUMENT = [5, 6, 7, 8, 9] * 60
LONG: Options = {"max_tokens": 400, "ignore_eos": True, "drafter": "none"}


def test_a_second_question_to_a_document_computes_the_rest_alone_with_the_same_bits(model: Model):
    options: Options = {"max_tokens": 12, "logprobs": 3, "ignore_eos": True}
    first = model.generate([*DOCUMENT, 10, 11], **options)
    second = model.generate([*DOCUMENT, 12, 13, 14], **options)
    (listed,) = model.generate([[*DOCUMENT, 12, 13, 14]], **options)
    uncached = model.fresh().generate([*DOCUMENT, 12, 13, 14], **options)
    assert [first.stats.cached_tokens, uncached.stats.cached_tokens] == [0, 0]
    block = model.engine.block_size
    assert len(DOCUMENT) // block * block <= second.stats.cached_tokens <= len(DOCUMENT)
    assert listed.stats.cached_tokens >= second.stats.cached_tokens
    assert second.logprobs == listed.logprobs == uncached.logprobs
    assert second.exact
    assert "prefix_cache" in second.exactness


def test_idle_kv_is_given_back_after_the_rest(model: Model, monkeypatch: pytest.MonkeyPatch):
    rests: list[int] = []
    monkeypatch.setattr(scheduler_module, "_REST_SECONDS", 0.02)
    monkeypatch.setattr(model.engine, "rest", lambda: rests.append(1))
    model.generate(DOCUMENT, max_tokens=3)
    until(lambda: bool(rests))


@pytest.mark.parametrize("way", ["stream", "generate", "list"])
def test_ctrl_c_leaves_the_answer_so_far_and_a_usable_model(way: str, model: Model):
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
    expected = model.fresh().generate(PROMPT, max_tokens=20).token_ids
    assert model.generate(PROMPT, max_tokens=20).token_ids == expected


def test_a_model_that_is_dropped_ends_its_thread(tiny_files: ModelFiles, cache: Path):
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


def test_an_unread_coroutine_stream_is_paused(model: Model):
    async def ask() -> list[int]:
        stream = model.astream(PROMPT, **LONG)
        read = (await anext(stream)).tokens
        load = model.scheduler.load
        while True:  # until it no longer advances
            calls = load.calls
            await asyncio.sleep(0.2)
            if load.calls == calls:
                break
        assert calls < 50
        async for step in stream:
            read += step.tokens
        return [*read]

    assert asyncio.run(ask()) == model.fresh().generate(PROMPT, **LONG).token_ids


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


def test_a_process_ends_cleanly_while_answers_run(tiny_gguf: Path, cache: Path):
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tiny_gguf)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
    assert "Traceback" not in done.stderr
