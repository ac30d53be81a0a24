"""Several streams in one call of the engine: `run_together` and `as_they_end`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.decoding.types import FinishReason
from paceline.errors import CacheFull, InvalidRequest
from paceline.models import ModelFiles
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.runtime.stream import Stream, as_they_end, run_together
from support.plain import PROMPTS, SAMPLED, free_of, plain, small


def test_interleaved_streams_have_the_tokens_of_each_alone(model: Model):
    ways: list[Options] = [
        {},
        {"drafter": "suffix"},
        SAMPLED,
        {**SAMPLED, "drafter": "ngram"},
    ]
    expected = [
        plain(model, prompt, **way).token_ids for prompt, way in zip(PROMPTS, ways, strict=True)
    ]
    streams = [
        model.stream(prompt, max_tokens=60, **way)
        for prompt, way in zip(PROMPTS, ways, strict=True)
    ]
    going = [*streams]
    while going:
        going = [stream for stream in going if next(stream, None) is not None]
    assert [stream.result.token_ids for stream in streams] == expected


@pytest.mark.parametrize("drafter", ["none", "suffix+ngram:min=1"])
def test_streams_in_one_call_have_the_tokens_of_each_alone(drafter: str, model: Model):
    ways: list[Options] = [{}, SAMPLED, {"max_tokens": 7}, {"stop": "T"}]
    pairs = [*zip(PROMPTS, ways, strict=True)]
    expected = [plain(model, prompt, **way) for prompt, way in pairs]
    streams = [
        model.stream(prompt, **{"max_tokens": 60, "drafter": drafter, **way})
        for prompt, way in pairs
    ]
    run_together(streams)
    assert [s.result.token_ids for s in streams] == [each.token_ids for each in expected]
    assert [s.result.text for s in streams] == [each.text for each in expected]


@pytest.mark.parametrize("drafter", ["none", "suffix", "suffix+ngram:min=1"])
@pytest.mark.parametrize("slots", [64, 96, 128, 192])
def test_streams_that_share_a_small_cache_wait_for_slots_or_end_with_length(
    slots: int, drafter: str, tiny_files: ModelFiles, cache: Path
):
    model = small(tiny_files, slots)
    free = model.engine.free_slots
    asked = {"max_tokens": 30, "ignore_eos": True, "policy": "fixed"}
    expected = [plain(model, prompt, **asked) for prompt in PROMPTS]
    streams = [model.stream(prompt, drafter=drafter, **asked) for prompt in PROMPTS]
    run_together(streams)
    found = [stream.result for stream in streams]
    assert {each.finish_reason for each in found} == {FinishReason.LENGTH}
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
    assert found[0].token_ids == expected[0].token_ids  # the newest one gives way
    if slots == 192:  # all of them fit
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert model.engine.free_slots == free


def test_a_stream_that_fails_among_several_frees_the_slots_of_all(
    tiny_files: ModelFiles, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    model = small(tiny_files, 192)
    streams = [model.stream(prompt, max_tokens=60, drafter="none") for prompt in PROMPTS]
    monkeypatch.setattr(streams[2], "accept", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_together(streams)
    assert model.engine.free_slots == free_of(model, 192)
    assert {stream.result.finish_reason for stream in streams} == {FinishReason.CANCELLED}


class Opened(list[Stream]):
    """Streams of some prompts, opened as they are asked for; the longest answers first."""

    def __init__(self, model: Model, most_at_once: int = 99, fails_at: int | None = None) -> None:
        self.free = model.engine.free_slots
        self._model = model
        self._most_at_once = most_at_once
        self._fails_at = fails_at

    def streams(self) -> Iterator[Stream]:
        for number, prompt in enumerate(PROMPTS * 2):
            if number == self._fails_at:
                raise InvalidRequest("no more")
            assert len(self.going) < self._most_at_once, "there was no room for another"
            length = 12 - number
            self.append(self._model.stream(prompt, max_tokens=length, drafter="none"))
            yield self[-1]

    @property
    def going(self) -> list[Stream]:
        return [stream for stream in self if not ended(stream)]

    def assert_all_let_go(self) -> None:
        assert not self.going
        assert self._model.engine.free_slots == self.free


def ended(stream: Stream) -> bool:
    try:
        return bool(stream.result)
    except RuntimeError:
        return False


@pytest.mark.parametrize("at_once", [1, 2, 3, 8, 20])
def test_each_stream_is_returned_once_when_it_ends(at_once: int, model: Model):
    opened = Opened(model, at_once)
    found = []
    for stream in as_they_end(opened.streams(), at_once):
        assert ended(stream)
        found.append(stream)
    assert len(opened) == len(PROMPTS) * 2
    assert sorted(map(id, found)) == sorted(map(id, opened))
    for number, (prompt, stream) in enumerate(zip(PROMPTS * 2, opened, strict=True)):
        assert stream.result.token_ids == plain(model, prompt, max_tokens=12 - number).token_ids
    lengths = [stream.result.completion_tokens for stream in found]
    if at_once >= len(opened):
        assert lengths == sorted(lengths), "the shortest ends first"
    opened.assert_all_let_go()


def test_a_call_has_as_many_streams_as_at_once_allows(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    sizes: list[int] = []
    step = type(model.engine).step

    def counting(engine: Any, work: Sequence[Any]) -> Any:
        sizes.append(len(work))
        return step(engine, work)

    monkeypatch.setattr(type(model.engine), "step", counting)
    assert len([*as_they_end(Opened(model).streams(), 3)]) == 8
    assert max(sizes) == 3
    assert sizes == sorted(sizes, reverse=True), "room is filled at once, as long as there are more"


def test_a_stream_is_opened_only_when_it_can_run(model: Model):
    opened = Opened(model)
    coming = as_they_end(opened.streams(), 3)
    assert not opened
    next(coming)
    assert len(opened) == 3
    next(coming)
    assert len(opened) <= 5
    coming.close()


def test_no_streams_return_none(model: Model):
    assert [*as_they_end(iter([]), 3)] == []


def test_closing_the_loop_early_closes_its_streams(model: Model):
    opened = Opened(model)
    coming = as_they_end(opened.streams(), 3)
    first = next(coming)
    assert len(opened.going) == 2
    coming.close()
    assert first.result.finish_reason == FinishReason.LENGTH
    reasons = [stream.result.finish_reason for stream in opened if stream is not first]
    assert reasons == [FinishReason.CANCELLED] * 2
    opened.assert_all_let_go()


@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_an_error_of_opening_a_stream_closes_the_others(fails_at: int, model: Model):
    opened = Opened(model, fails_at=fails_at)
    with pytest.raises(InvalidRequest, match="no more"):
        for _ in as_they_end(opened.streams(), 3):
            pass
    assert len(opened) == fails_at
    opened.assert_all_let_go()


@pytest.mark.parametrize("error", [CacheFull, KeyboardInterrupt])
@pytest.mark.parametrize("calls", [0, 7])
def test_an_error_of_a_call_closes_all_streams(
    calls: int, error: type[BaseException], model: Model, monkeypatch: pytest.MonkeyPatch
):
    step, left = type(model.engine).step, [calls]

    def failing(engine: Any, work: Sequence[Any]) -> Any:
        if not left[0]:
            raise error
        left[0] -= 1
        return step(engine, work)

    opened = Opened(model)
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(type(model.engine), "step", failing)
        for _ in as_they_end(opened.streams(), 3):
            pass
    opened.assert_all_let_go()


def test_watch_is_called_after_each_step_and_may_close_a_stream(model: Model):
    opened = Opened(model)
    seen: dict[int, list[int]] = {}

    def watch(stream: Stream) -> None:
        seen.setdefault(id(stream), []).append(len(stream.answer))
        if stream is opened[1] and len(stream.answer) == 4:
            stream.close()

    found = [*as_they_end(opened.streams(), 3, watch)]
    assert len(found) == 8
    for number, stream in enumerate(opened):
        length = 4 if number == 1 else 12 - number
        whole = plain(model, (PROMPTS * 2)[number], max_tokens=12).token_ids
        assert stream.result.token_ids == whole[:length], "nobody else minds"
        assert seen[id(stream)] == [*range(1, length + 1)]
        cancelled = stream.result.finish_reason == FinishReason.CANCELLED
        assert cancelled == (number == 1)
    opened.assert_all_let_go()


def test_an_error_of_watch_closes_all_streams(model: Model):
    opened = Opened(model)

    def watch(stream: Stream) -> None:
        if len(stream.answer) == 3:
            raise ValueError("seen enough")

    with pytest.raises(ValueError, match="seen enough"):
        for _ in as_they_end(opened.streams(), 3, watch):
            pass
    opened.assert_all_let_go()
