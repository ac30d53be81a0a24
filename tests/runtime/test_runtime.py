from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.decoding.types import FinishReason
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.errors import CacheFull, InvalidRequest, ModelError, ModelNotFound
from paceline.models import ModelFiles, Progress
from paceline.runtime.defaults import Defaults
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.runtime.options import POLICIES, Options
from paceline.runtime.result import Result
from paceline.runtime.stream import Stream, as_they_end, run_together
from support.dflash import tiny_config, write_checkpoint
from support.tiny import write_tiny

PROMPT = "this is one and the user"
PROMPTS = [PROMPT, "Hello", "2 + 2 = 12, and the", "is this the one? is this the one?"]
SAMPLED: Options = {"temperature": 0.9, "seed": 3, "top_p": 0.95}
DRAFTERS = ("auto", "ngram", "suffix", "suffix:earlier", "recycle", "suffix+ngram:max=2+recycle")
END = 2  # the id of <|im_end|>


def plain(model: Model, prompt: Any = PROMPT, **options: Any) -> Result:
    return model.generate(prompt, **{"max_tokens": 60, "drafter": "none", **options})


# -- one answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_whatever_drafts_the_tokens_are_plain_decodings(
    drafter: str, sampling: Options, model: Model
):
    for prompt in PROMPTS:
        expected = plain(model, prompt, **sampling)
        found = plain(model, prompt, **sampling, drafter=drafter)
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert found.finish_reason == expected.finish_reason


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", [2, 5, 32])
def test_whatever_the_policy_and_block_the_tokens_are_plain_decodings(
    policy: str, block: int, model: Model
):
    expected = plain(model).token_ids
    found = plain(model, drafter="auto", policy=policy, max_block=block)
    assert found.token_ids == expected
    assert found.policy == policy


def test_a_drafter_that_guesses_right_saves_calls(model: Model):
    # This text soon repeats itself, so looking back must pay.
    alone, drafted = plain(model), plain(model, drafter="suffix", policy="fixed")
    assert alone.stats.steps == 59
    assert alone.stats.drafted == 0
    assert drafted.stats.steps < 40
    assert drafted.stats.accepted >= 20
    assert drafted.stats.drafted_by == {"suffix": drafted.stats.drafted}
    assert drafted.stats.accepted_by == {"suffix": drafted.stats.accepted}
    assert drafted.stats.tokens_per_step == 59 / drafted.stats.steps


def test_a_result_says_what_was_asked_and_what_came(model: Model):
    found = plain(model, max_tokens=5, drafter="auto", seed=9)
    assert found.prompt_tokens == len(model.tokens(PROMPT))
    assert found.completion_tokens == len(found.token_ids) == 5
    assert found.finish_reason == FinishReason.LENGTH
    assert found.engine == "openvino"
    assert found.drafter == "suffix", "what auto stands for"
    assert found.model == model.files.name
    assert found.seed == 9
    assert found.exact
    stats = found.stats
    assert stats.decode_seconds >= stats.verify_seconds > 0
    assert stats.first_token_seconds >= stats.prefill_seconds > 0
    assert stats.host_seconds >= stats.draft_seconds > 0


def test_a_stream_tells_what_generate_returns(model: Model):
    expected = plain(model, drafter="suffix")
    stream = model.stream(PROMPT, max_tokens=60, drafter="suffix")
    steps = [*stream]
    assert [token for step in steps for token in step.tokens] == expected.token_ids
    assert stream.result.token_ids == expected.token_ids
    assert stream.result.text == expected.text
    # What was held back comes with the result.
    assert expected.text.startswith("".join(step.text for step in steps))
    assert stream.tokens == model.tokens(PROMPT) + expected.token_ids
    stream.close()
    assert stream.result.finish_reason == FinishReason.LENGTH, "closing what has ended does nothing"
    assert [*stream] == []


def test_a_result_before_the_end_is_a_fault_of_the_caller(model: Model):
    with model.stream(PROMPT, max_tokens=5) as stream:
        with pytest.raises(RuntimeError, match="iterate to its end, or close"):
            _ = stream.result
        next(stream)
        with pytest.raises(RuntimeError):
            _ = stream.result


def test_leaving_early_frees_the_slots_and_keeps_the_answer_so_far(model: Model):
    expected, free = plain(model), model.engine.free_slots
    with model.stream(PROMPT, drafter="none") as stream:
        for _ in range(10):
            next(stream)
        assert model.engine.free_slots < free
    assert model.engine.free_slots == free
    assert stream.result.finish_reason == FinishReason.CANCELLED
    assert stream.result.token_ids == expected.token_ids[:10]
    assert expected.text.startswith(stream.result.text)


def test_a_stream_that_was_never_begun_can_be_closed(model: Model):
    stream = model.stream(PROMPT)
    stream.close()
    assert stream.result.token_ids == []
    assert stream.result.finish_reason == FinishReason.CANCELLED


def test_an_error_in_the_loop_that_reads_a_stream_frees_its_slots(model: Model):
    free = model.engine.free_slots
    with pytest.raises(KeyboardInterrupt), model.stream(PROMPT) as stream:
        next(stream)
        raise KeyboardInterrupt
    assert model.engine.free_slots == free


# -- when it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 17])
@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_max_tokens_is_never_passed(count: int, drafter: str, model: Model):
    found = plain(model, max_tokens=count, drafter=drafter, policy="fixed")
    assert found.completion_tokens == count
    assert found.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_without_max_tokens_an_answer_goes_on_to_the_context_limit(drafter: str, model: Model):
    found = model.generate(PROMPT, drafter=drafter, ignore_eos=True)
    assert found.prompt_tokens + found.completion_tokens == model.engine.context_length
    assert found.finish_reason == FinishReason.LENGTH


def test_an_end_token_ends_the_answer_and_is_not_in_its_text(model: Model):
    found = plain(model, logit_bias={END: 1000.0})
    assert (found.token_ids, found.text) == ([END], "")
    assert found.finish_reason == FinishReason.STOP
    ignored = plain(model, logit_bias={END: 1000.0}, ignore_eos=True)
    assert ignored.token_ids == [END] * 60


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_stop_string_ends_the_answer_and_is_not_in_its_text(drafter: str, model: Model):
    whole = plain(model).text
    at = 30
    stop = whole[at : at + 3]
    found = plain(model, stop=stop, drafter=drafter, policy="fixed")
    assert found.text == whole[: whole.index(stop)]
    assert found.finish_reason == FinishReason.STOP
    assert plain(model, stop=[stop, "never in there"]).text == found.text


# -- sampling --------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_again_and_another_seed_gives_others(model: Model):
    first = plain(model, temperature=1.0)
    again = plain(model, temperature=1.0, seed=first.seed, drafter="recycle")
    other = plain(model, temperature=1.0, seed=first.seed + 1)
    assert again.token_ids == first.token_ids
    assert other.token_ids != first.token_ids


def test_penalties_and_bias_reach_the_sampler(model: Model):
    first = plain(model).token_ids[0]
    assert plain(model, logit_bias={first: -100.0}).token_ids[0] != first
    assert len({*plain(model, presence_penalty=100.0).token_ids}) == 60
    with pytest.raises(InvalidRequest, match="logit_bias names token 320"):
        plain(model, logit_bias={320: 1.0})


# -- prompts ---------------------------------------------------------------------------------------


def test_a_prompt_may_be_text_messages_or_tokens(model: Model):
    tokens = model.tokens(PROMPT)
    messages = [{"role": "user", "content": PROMPT}]
    assert model.tokens(messages) == tokens
    assert model.files.tokenizer().decode(tokens) == f"user\n{PROMPT}\nassistant\n"
    expected = plain(model).token_ids
    assert plain(model, messages).token_ids == expected
    assert plain(model, tokens).token_ids == expected
    assert plain(model, tuple(tokens)).token_ids == expected


def test_a_raw_prompt_is_taken_as_it_is(model: Model):
    raw = model.tokens("<|im_start|>x", raw=True)
    assert raw == model.files.tokenizer().encode("<|im_start|>x", special=True)
    assert plain(model, "<|im_start|>x", raw=True).prompt_tokens == len(raw)


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(prompt: Any, model: Model):
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        model.generate(prompt)


def test_a_prompt_without_room_for_an_answer_is_refused_with_both_lengths(model: Model):
    with pytest.raises(InvalidRequest, match="prompt has 512 tokens and the context holds 512"):
        model.generate([5] * 512)
    with pytest.raises(InvalidRequest, match="shorten the prompt"):
        model.generate("x " * 5000)
    assert model.generate([5] * 511).completion_tokens == 1


@pytest.mark.parametrize("prompt", [[-1], [320], [1, 10**12]])
def test_tokens_that_the_model_has_not_are_refused(prompt: list[int], model: Model):
    with pytest.raises(InvalidRequest, match="outside 0 to 319"):
        model.generate(prompt)


@pytest.mark.parametrize(
    "prompt", [[{"role": "tool", "content": "x"}], [{"role": "user"}], ["x"], [1, "x"]]
)
def test_messages_that_the_template_refuses_are_the_callers_fault(prompt: Any, model: Model):
    with pytest.raises(InvalidRequest):
        model.generate(prompt)


def test_options_are_checked_before_anything_runs(model: Model):
    options: Any = {"max_token": 3}
    with pytest.raises(InvalidRequest, match="did you mean max_tokens"):
        model.stream(PROMPT, **options)
    with pytest.raises(InvalidRequest, match="no drafter is called 'magic'"):
        model.stream(PROMPT, drafter="magic")


# -- several at once -------------------------------------------------------------------------------


def test_interleaved_streams_do_not_disturb_each_other(model: Model):
    ways: list[Options] = [{}, {"drafter": "suffix"}, SAMPLED, {**SAMPLED, "drafter": "recycle"}]
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


@pytest.mark.parametrize("drafter", ["none", "suffix+recycle"])
def test_together_in_one_call_the_tokens_are_those_of_each_alone(drafter: str, model: Model):
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


@pytest.mark.parametrize("drafter", ["none", "suffix", "suffix+recycle"])
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


def test_one_that_fails_among_several_frees_all(
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
def test_streams_come_as_they_end_each_once_with_its_own_tokens(at_once: int, model: Model):
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


def test_a_call_has_as_many_streams_as_there_is_room_for(
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


def test_no_stream_is_opened_before_there_is_room_for_it(model: Model):
    opened = Opened(model)
    coming = as_they_end(opened.streams(), 3)
    assert not opened
    next(coming)
    assert len(opened) == 3
    next(coming)
    assert len(opened) <= 5
    coming.close()


def test_where_there_are_no_streams_none_end(model: Model):
    assert [*as_they_end(iter([]), 3)] == []


def test_who_stops_early_leaves_no_stream_open(model: Model):
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
def test_a_stream_that_cannot_be_opened_leaves_none_open(fails_at: int, model: Model):
    opened = Opened(model, fails_at=fails_at)
    with pytest.raises(InvalidRequest, match="no more"):
        for _ in as_they_end(opened.streams(), 3):
            pass
    assert len(opened) == fails_at
    opened.assert_all_let_go()


@pytest.mark.parametrize("error", [CacheFull, KeyboardInterrupt])
@pytest.mark.parametrize("calls", [0, 7])
def test_a_call_that_fails_leaves_no_stream_open(
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


def test_who_watches_sees_each_step_and_may_end_a_stream(model: Model):
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


def test_who_watches_and_fails_leaves_no_stream_open(model: Model):
    opened = Opened(model)

    def watch(stream: Stream) -> None:
        if len(stream.answer) == 3:
            raise ValueError("seen enough")

    with pytest.raises(ValueError, match="seen enough"):
        for _ in as_they_end(opened.streams(), 3, watch):
            pass
    opened.assert_all_let_go()


# -- conversations ---------------------------------------------------------------------------------


@pytest.fixture
def chat(model: Model) -> Iterator[Any]:
    conversation = model.conversation([{"role": "system", "content": "one"}])
    yield conversation
    conversation.close()


def said(stream: Any) -> Result:
    for _ in stream:
        pass
    result: Result = stream.result
    return result


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_conversations_answers_are_those_of_fresh_requests(
    sampling: Options, chat: Any, model: Model
):
    for turn, text in enumerate(PROMPTS):
        messages = [*chat.messages, {"role": "user", "content": text}]
        found = said(chat.say(text, max_tokens=20, drafter="suffix", **sampling))
        expected = plain(model, messages, max_tokens=20, **sampling)
        assert found.token_ids == expected.token_ids
        assert expected.stats.cached_tokens == 0
        if turn:
            assert found.stats.cached_tokens > 0, "the earlier turns are not computed again"
    assert [message["role"] for message in chat.messages] == ["system"] + ["user", "assistant"] * 4


def test_a_conversation_whose_turns_were_edited_answers_what_is_there_now(chat: Any, model: Model):
    said(chat.say(PROMPTS[0], max_tokens=20))
    said(chat.say(PROMPTS[1], max_tokens=20))
    chat.messages[1] = {"role": "user", "content": "other"}
    del chat.messages[3:]
    messages = [*chat.messages, {"role": "user", "content": "and"}]
    found = said(chat.say("and", max_tokens=20))
    assert found.token_ids == plain(model, messages, max_tokens=20).token_ids
    assert 0 < found.stats.cached_tokens < len(model.tokens(messages[:2]))


def test_an_answer_that_was_left_early_is_a_turn_like_any_other(chat: Any, model: Model):
    with chat.say(PROMPT, max_tokens=40) as stream:
        for _ in range(3):
            next(stream)
    assert chat.messages[-1] == {"role": "assistant", "content": stream.result.text}
    messages = [*chat.messages, {"role": "user", "content": "and"}]
    found = said(chat.say("and", max_tokens=20))
    assert found.token_ids == plain(model, messages, max_tokens=20).token_ids


def test_a_message_that_cannot_be_served_leaves_the_chat_as_it_was(chat: Any, model: Model):
    said(chat.say("Hello", max_tokens=5))
    before = [*chat.messages]
    for text, options in (("", {}), ("x", {"top_p": 7.0}), ("x " * 2000, {})):
        with pytest.raises(InvalidRequest):
            chat.say(text, **options)
        assert chat.messages == before
    messages = [*before, {"role": "user", "content": "and"}]
    found = said(chat.say("and", max_tokens=20))
    assert found.token_ids == plain(model, messages, max_tokens=20).token_ids


def test_the_same_message_twice_computes_one_token_again_at_least(model: Model):
    # The whole prompt is held, yet its last row is needed.
    chat = model.conversation()
    first = said(chat.say(PROMPT, max_tokens=5))
    chat.messages = []
    again = said(chat.say(PROMPT, max_tokens=5))
    assert again.token_ids == first.token_ids
    assert again.stats.cached_tokens == again.prompt_tokens - 1
    chat.close()
    chat.close()


# -- what is remembered ----------------------------------------------------------------------------


def test_a_drafter_that_looks_in_earlier_answers_finds_them(model: Model):
    options: Any = {"drafter": "suffix:earlier", "policy": "fixed", **SAMPLED}
    first, second = plain(model, **options), plain(model, **options)
    assert second.token_ids == first.token_ids
    assert second.stats.accepted > first.stats.accepted
    assert second.stats.steps < first.stats.steps / 2
    other = plain(Model(model.files, model.engine), **options)
    assert other.stats.accepted == first.stats.accepted, "what one model heard another has not"


def test_a_probe_counts_and_changes_nothing(model: Model):
    without = plain(model, drafter="recycle", policy="fixed")
    found = plain(model, drafter="recycle", policy="fixed", probe="ngram+suffix")
    assert found.token_ids == without.token_ids
    assert found.stats.steps == without.stats.steps
    assert found.stats.drafted == without.stats.drafted
    assert without.stats.probe is None
    assert found.stats.probe is not None
    assert found.stats.probe.keys() == {"ngram", "suffix"}
    for seen in found.stats.probe.values():
        assert 0 < seen["accepted"] < seen["drafted"]
        assert 0 < seen["steps"] < 60


def test_a_probe_works_without_a_drafter(model: Model):
    found = plain(model, probe="suffix")
    assert found.stats.drafted == 0
    assert found.stats.probe is not None
    assert found.stats.probe["suffix"]["accepted"] > 0


def test_the_machine_is_measured_once_for_a_model(model: Model, monkeypatch: pytest.MonkeyPatch):
    first = model.measure_profile(again=True)
    assert first.row_invariant
    other = Model(model.files, model.engine)
    monkeypatch.setattr(type(model.engine), "step", lambda *_: pytest.fail("measured again"))
    assert other.profile == first


# -- drafters that see hidden states ---------------------------------------------------------------


@pytest.fixture(scope="module")
def dflash(tiny_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The spec of a drafter that fits the tiny model, and knows nothing but five letters of it."""
    folder = tmp_path_factory.mktemp("dflash")
    letters = tiny_files.tokenizer().encode("tTWwe")
    write_checkpoint(folder, tiny_config(tiny_files), draft_vocab=sorted(letters))
    return f"dflash:{folder}"


@pytest.fixture(scope="module")
def tapped_engine(tiny_files: ModelFiles) -> Engine:
    settings = EngineSettings(cache_tokens=8 * tiny_files.context_length, taps=(0, 1))
    return open_engine("openvino", tiny_files.path, tiny_files.context_length, settings)


@pytest.fixture
def tapped(tapped_engine: Engine, tiny_files: ModelFiles, cache: Path) -> Iterator[Model]:
    free = tapped_engine.free_slots
    yield Model(tiny_files, tapped_engine)
    assert tapped_engine.free_slots == free


class Opening:
    """Opens engines for a model, and notes with which taps."""

    def __init__(self, files: ModelFiles) -> None:
        self.asked: list[tuple[int, ...]] = []
        self._files = files

    def __call__(self, taps: tuple[int, ...]) -> Engine:
        self.asked.append(taps)
        settings = EngineSettings(cache_tokens=2 * self._files.context_length, taps=taps)
        return open_engine("openvino", self._files.path, self._files.context_length, settings)


@pytest.fixture
def opening(tiny_files: ModelFiles, cache: Path) -> Opening:
    return Opening(tiny_files)


@pytest.fixture
def reopening(opening: Opening, tiny_model: Model) -> Model:
    """A model without taps whose engine can be opened again."""
    return Model(tiny_model.files, tiny_model.engine, open_with=opening)


@pytest.mark.parametrize("policy", ["fixed", "auto"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_drafter_that_sees_hidden_states_changes_no_token(
    tapped: Model, dflash: str, sampling: Options, policy: str
):
    drafted = 0
    for prompt in PROMPTS:
        expected = plain(tapped, prompt, **sampling)
        for spec in (dflash, f"suffix+{dflash},window=16,int8=0"):
            found = plain(tapped, prompt, **sampling, drafter=spec, policy=policy, max_block=5)
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            assert found.exact
            assert found.drafter == spec
            drafted += found.stats.drafted_by.get("dflash", 0)
    assert drafted > 0


def test_taps_change_no_token(tapped: Model, model: Model):
    assert plain(tapped).token_ids == plain(model).token_ids


def test_with_hidden_states_streams_may_be_interleaved_and_run_together(tapped: Model, dflash: str):
    expected = [plain(tapped, prompt).token_ids for prompt in PROMPTS]
    options: Options = {"max_tokens": 60, "drafter": dflash, "policy": "fixed"}
    going = streams = [tapped.stream(prompt, **options) for prompt in PROMPTS]
    while going:
        going = [stream for stream in going if next(stream, None) is not None]
    together = [tapped.stream(prompt, **options) for prompt in PROMPTS]
    run_together(together)
    assert [stream.result.token_ids for stream in streams] == expected
    assert [stream.result.token_ids for stream in together] == expected


def test_a_probe_sees_hidden_states(tapped: Model, dflash: str):
    found = plain(tapped, probe=dflash)
    assert found.token_ids == plain(tapped).token_ids
    assert found.stats.probe is not None
    assert found.stats.probe["dflash"]["drafted"] > 0


def test_drafters_that_are_named_when_loading_find_what_they_need(
    tiny_gguf: Path, cache: Path, dflash: str
):
    model = load(tiny_gguf, drafters=("suffix", dflash))
    engine = model.engine
    assert engine.taps == (0, 1)
    assert plain(model, drafter=dflash).token_ids == plain(model).token_ids
    assert model.engine is engine
    assert load(tiny_gguf).engine.taps == ()


def test_a_drafter_that_cannot_be_had_is_refused_when_loading(tiny_gguf: Path, cache: Path):
    with pytest.raises(InvalidRequest, match=r"dflash:FOLDER"):
        load(tiny_gguf, drafters=("dflash",))
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tiny_gguf, drafters=(f"dflash:{cache}",))


def test_the_engine_is_opened_again_once_for_a_drafter_that_needs_more(
    reopening: Model, opening: Opening, dflash: str
):
    before, measured = reopening.engine, reopening.profile
    expected = plain(reopening).token_ids
    assert plain(reopening, drafter="suffix").token_ids == expected
    assert opening.asked == []
    for drafter in (dflash, f"suffix+{dflash}", "suffix", "none"):
        assert plain(reopening, drafter=drafter).token_ids == expected
        assert opening.asked == [(0, 1)]
    assert reopening.engine is not before
    assert reopening.profile is not measured


def test_layers_that_were_tapped_stay_so(
    opening: Opening, tiny_files: ModelFiles, tmp_path: Path, dflash: str
):
    one = tiny_config(tiny_files, target_layer_ids=(1,))
    write_checkpoint(tmp_path, one)
    model = Model(tiny_files, opening((1,)), open_with=opening)
    plain(model, drafter=f"dflash:{tmp_path}", max_tokens=5)
    plain(model, probe=dflash, max_tokens=5)
    plain(model, drafter=f"dflash:{tmp_path}", max_tokens=5)
    assert opening.asked == [(1,), (0, 1)]


def test_while_something_is_open_the_engine_is_not_opened_again(
    reopening: Model, opening: Opening, dflash: str
):
    refused = pytest.raises(InvalidRequest, match=r"needs hidden states .*; name it when loading")
    with reopening.stream(PROMPT, max_tokens=5, drafter="none") as stream:
        next(stream)
        with refused:
            reopening.generate(PROMPT, drafter=dflash)
    chat = reopening.conversation()
    with refused:
        reopening.generate(PROMPT, drafter=dflash)
    with refused:
        chat.say("Hello", drafter=dflash)
    with refused:
        reopening.generate(PROMPT, drafter="none", probe=dflash)
    assert said(chat.say("Hello", max_tokens=5)).completion_tokens == 5, "the chat is as it was"
    assert opening.asked == []
    chat.close()
    chat.close()
    assert plain(reopening, max_tokens=5, drafter=dflash).completion_tokens == 5
    assert opening.asked == [(0, 1)]


def test_an_engine_that_cannot_be_opened_again_is_not(model: Model, dflash: str):
    with pytest.raises(InvalidRequest, match="name it when loading"):
        model.generate(PROMPT, drafter=dflash)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [([5] * 512, {}), ([-1], {}), (PROMPT, {"drafter": "table:nothing"})],
    ids=["too long", "no token", "no drafter"],
)
def test_a_request_that_was_refused_is_not_open(
    reopening: Model, opening: Opening, dflash: str, prompt: Any, options: Any
):
    with pytest.raises((InvalidRequest, ModelError)):
        reopening.generate(prompt, **options)
    plain(reopening, max_tokens=5, drafter=dflash)
    assert opening.asked == [(0, 1)]


def test_a_drafter_for_another_target_is_refused_and_nothing_stays_behind(
    tapped: Model, tmp_path: Path
):
    config = tiny_config(tapped.files, hidden_size=128, num_target_layers=9)
    write_checkpoint(tmp_path, config)
    with pytest.raises(ModelError, match="its hidden size is 128, the target's 64; its number of"):
        tapped.generate(PROMPT, drafter=f"dflash:{tmp_path}")
    assert plain(tapped, max_tokens=5).completion_tokens == 5


TURNS = ["Hello", "and the next one", "is this the one?"]


@pytest.mark.parametrize("ways", ["dddd", "dndd", "dsdn", "nddd"])
def test_a_chat_drafted_from_hidden_states_goes_as_it_would_plainly(
    tapped: Model, dflash: str, ways: str
):
    drafters = {"d": dflash, "n": "none", "s": f"suffix+{dflash}"}
    expected, found = tapped.conversation(), tapped.conversation()
    for turn, way in zip([*TURNS, "end"], ways, strict=True):
        plainly = said(expected.say(turn, max_tokens=25, drafter="none"))
        options: Any = {"max_tokens": 25, "drafter": drafters[way], "policy": "fixed"}
        drafted = said(found.say(turn, **options))
        assert drafted.token_ids == plainly.token_ids
        assert (drafted.stats.drafted > 0) == (way != "n")
    expected.close()
    found.close()


def test_a_turn_that_was_taken_back_is_forgotten(tapped: Model, dflash: str):
    options: Any = {"max_tokens": 25, "drafter": dflash, "policy": "fixed"}
    chat = tapped.conversation()
    said(chat.say(TURNS[0], **options))
    before = chat.messages
    said(chat.say(TURNS[1], **options))
    chat.messages = before
    again = said(chat.say(TURNS[2], **options))
    chat.close()
    fresh = tapped.conversation(before)
    expected = said(fresh.say(TURNS[2], **options))
    assert again.token_ids == expected.token_ids
    # And the drafter saw the same: the fresh one read what the other had kept.
    assert again.stats.drafted_by == expected.stats.drafted_by
    assert again.stats.accepted_by == expected.stats.accepted_by
    fresh.close()


def test_a_turn_that_was_left_early_is_known_as_far_as_it_went(tapped: Model, dflash: str):
    options: Any = {"max_tokens": 25, "drafter": dflash, "policy": "fixed"}
    chat = tapped.conversation()
    with chat.say(TURNS[0], **options) as stream:
        next(stream)
        next(stream)
    messages = chat.messages
    found = said(chat.say(TURNS[1], **options))
    chat.close()
    fresh = tapped.conversation(messages)
    expected = said(fresh.say(TURNS[1], **options))
    assert found.token_ids == expected.token_ids
    assert found.stats.accepted_by == expected.stats.accepted_by
    fresh.close()


# -- sampling that comes with a model --------------------------------------------------------------

OWN = Defaults(
    registry={"temperature": 0.9, "top_p": 0.9}, model={"repetition_penalty": 1.2, "max_tokens": 9}
)


def test_what_a_request_does_not_name_comes_from_registry_and_model(model: Model):
    own = Model(model.files, model.engine, defaults=OWN)
    found = own.generate("Hello", seed=5, drafter="suffix")
    asked: Options = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "max_tokens": 9}
    expected = model.generate("Hello", seed=5, drafter="none", **asked)
    assert found.token_ids == expected.token_ids != plain(model, "Hello").token_ids[:9]
    assert found.settings["temperature"] == (0.9, "registry")
    assert found.settings["max_tokens"] == (9, "model")
    assert expected.settings["temperature"] == (0.9, "request")
    assert own.fresh().generate("Hello", seed=5).token_ids == found.token_ids
    chat = own.conversation()
    assert said(chat.say("Hello", seed=5)).token_ids == found.token_ids
    chat.close()


def test_generation_config_none_is_greedy_in_a_request_and_when_loading(
    model: Model, tmp_path: Path
):
    expected = plain(model, "Hello", max_tokens=12).token_ids
    own = Model(model.files, model.engine, defaults=OWN)
    assert plain(own, "Hello", max_tokens=12, generation_config="none").token_ids == expected
    path = write_tiny(tmp_path / "m.gguf", fields={"general.sampling.temp": 0.9})
    loaded = paceline.load(path, drafters=["none"])
    assert loaded.generate("Hello", max_tokens=3).settings["temperature"] == (
        pytest.approx(0.9),
        "model",
    )
    off = paceline.load(path, drafters=["none"], generation_config="none")
    assert off.generate("Hello", max_tokens=12, drafter="none").token_ids == expected
    with pytest.raises(InvalidRequest, match="generation_config is 'vllm'"):
        paceline.load(path, generation_config="vllm")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_repetition_detection_stops_at_the_same_token_and_gives_its_slots_back(
    drafter: str, model: Model
):
    loop: Options = {"logit_bias": {40: 100.0}, "max_tokens": 400, "repetition_detection": True}
    found = model.generate("Hello", drafter=drafter, **loop)
    assert (found.finish_reason, found.token_ids) == (FinishReason.REPETITION, [40] * 256)
    rule = {"max_pattern_size": 2, "min_count": 5}
    found = model.generate("Hello", drafter=drafter, **{**loop, "repetition_detection": rule})
    assert found.token_ids == [40] * 5
    off = model.generate("Hello", drafter=drafter, **{**loop, "repetition_detection": None})
    assert (off.finish_reason, off.completion_tokens) == (FinishReason.LENGTH, 400)


def test_repetition_before_min_tokens_does_not_end_an_answer(model: Model):
    loop: Options = {"logit_bias": {40: 100.0}, "max_tokens": 400, "repetition_detection": True}
    assert model.generate("Hello", min_tokens=300, **loop).completion_tokens == 300


# -- the cache of keys and values ------------------------------------------------------------------


def small(files: ModelFiles, tokens: int) -> Model:
    settings = EngineSettings(cache_tokens=tokens)
    return Model(files, open_engine("openvino", files.path, files.context_length, settings))


def free_of(model: Model, tokens: int = 96) -> int:
    """The slots that are free when nobody holds any: what was asked for, in whole blocks."""
    fresh = small(model.files, tokens)
    return fresh.engine.free_slots


def test_a_prompt_that_leaves_the_cache_no_slot_is_refused_before_anything_runs(
    tiny_files: ModelFiles, cache: Path
):
    model = small(tiny_files, 96)
    free = model.engine.free_slots
    for length in (free, free + 1, 200):
        with pytest.raises(CacheFull, match="cache_tokens"):
            model.stream([5] * length, drafter="none", ignore_eos=True)
    assert model.engine.free_slots == free
    assert plain(model, "Hello", max_tokens=20).completion_tokens == 20


@pytest.mark.parametrize("policy", ["fixed", "adaptive", "kelly", "auto"])
@pytest.mark.parametrize("block", [2, 5, 16, 32])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_answer_that_fills_the_cache_ends_with_length_at_the_same_token(
    drafter: str, block: int, policy: Any, full: Model, cache: Path
):
    model = full.fresh()
    free = model.engine.free_slots
    filled = model.generate([5] * 70, drafter="none", ignore_eos=True)
    found = model.generate(
        [5] * 70, drafter=drafter, max_block=block, policy=policy, ignore_eos=True
    )
    assert found.finish_reason is FinishReason.LENGTH
    assert found.prompt_tokens + found.completion_tokens == free
    assert found.token_ids == filled.token_ids
    assert model.engine.free_slots == free


@pytest.fixture(scope="module")
def full(tiny_files: ModelFiles) -> Model:
    """A model whose cache is full after 96 tokens."""
    return small(tiny_files, 96)


def test_a_stream_whose_slots_others_take_meanwhile_ends_with_length(
    tiny_files: ModelFiles, cache: Path
):
    model = small(tiny_files, 96)
    free = model.engine.free_slots
    stream = model.stream("Hello", drafter="none", ignore_eos=True)
    first = next(stream)
    with model.stream(
        [5] * (model.engine.free_slots - 2), drafter="none", ignore_eos=True
    ) as other:
        next(other)
        for _ in stream:
            pass
        assert stream.result.finish_reason is FinishReason.LENGTH
        assert stream.result.token_ids[:1] == first.tokens
        assert 0 < stream.result.completion_tokens < free - stream.result.prompt_tokens
    assert model.engine.free_slots == free


# -- loading ---------------------------------------------------------------------------------------


def test_a_model_is_loaded_by_path_and_says_how_long_it_took(tiny_gguf: Path, cache: Path):
    model = paceline.load(tiny_gguf)
    assert isinstance(model, paceline.Model)
    assert model.generate(PROMPT, max_tokens=3).stats.load_seconds == model.load_seconds > 0


def test_with_one_row_a_call_nothing_is_promised(tiny_gguf: Path, cache: Path):
    model = load(tiny_gguf, rows=1)
    assert not model.generate(PROMPT, max_tokens=3, drafter="none").exact
    assert not model.generate(PROMPT, max_tokens=3, drafter="suffix").exact


def test_without_a_drafter_nothing_needs_measuring(tiny_gguf: Path, cache: Path):
    class Told(Progress):
        def say(self, text: str) -> None:
            raise AssertionError(text)

    model = load(tiny_gguf, progress=Told())
    assert model.generate(PROMPT, max_tokens=3, drafter="none").exact


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"rows": 3}, "rows is 3"),
        ({"cache_tokens": 0}, "cache_tokens is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"engine": "magic"}, "no engine is called 'magic'; expected openvino"),
    ],
)
def test_a_setting_out_of_range_is_refused(
    settings: Any, reason: str, tiny_gguf: Path, cache: Path
):
    with pytest.raises(InvalidRequest, match=reason):
        load(tiny_gguf, **settings)


def test_what_is_no_model_is_refused(tmp_path: Path, cache: Path):
    with pytest.raises(ModelNotFound):
        load(tmp_path / "nothing.gguf")
    (tmp_path / "bad.gguf").write_text("bad")
    with pytest.raises(ModelError, match="not a GGUF file"):
        load(tmp_path / "bad.gguf")


def test_the_librarys_names_are_found_and_others_are_not():
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = paceline.nothing


# -- logprobs, constraints, predictions ------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_logprobs_come_with_the_answer_and_the_prompt(drafter: str, model: Model):
    found = model.generate(
        "the rain in the",
        raw=True,
        max_tokens=9,
        drafter=drafter,
        logprobs=3,
        prompt_logprobs=True,
    )
    assert [each.token for each in found.logprobs] == found.token_ids
    prompt = model.tokens("the rain in the", raw=True)
    assert found.prompt_logprobs[0] is None
    assert [each.token for each in found.prompt_logprobs[1:] if each] == prompt[1:]
    for each in found.logprobs:
        assert each.top[0] == (each.token, each.logprob)  # it is greedy
        assert len(each.top) == 3
        assert each.logprob <= 0
    plain = model.generate("the rain in the", raw=True, max_tokens=9, drafter="none", logprobs=3)
    assert plain.logprobs == found.logprobs


def test_without_being_asked_no_logprobs_are_kept(model: Model):
    found = model.generate("the", max_tokens=3)
    assert found.logprobs == found.prompt_logprobs == []


def test_an_answer_does_not_end_before_min_tokens(model: Model):
    plain = model.generate("the rain", max_tokens=8, ignore_eos=True, drafter="none")
    first = plain.token_ids[0]
    files = replace(model.files, facts=replace(model.files.facts, stop_token_ids=(first,)))
    ends = Model(files, model.engine)
    assert ends.generate("the rain", max_tokens=8).token_ids == [first]
    assert len(ends.generate("the rain", max_tokens=8, min_tokens=5).token_ids) >= 5


def test_a_prediction_saves_calls_and_changes_nothing(model: Model):
    plain = model.generate("the rain", max_tokens=30, ignore_eos=True, drafter="none")
    predicted = model.generate(
        "the rain",
        max_tokens=30,
        ignore_eos=True,
        prediction=plain.token_ids,
        policy="fixed",
        max_block=10,
    )
    assert predicted.token_ids == plain.token_ids
    assert predicted.stats.accepted_by["prediction"] > 20
    assert predicted.stats.steps < 5


def test_a_prediction_can_be_all_that_is_drafted_from(model: Model):
    plain = model.generate("the rain", max_tokens=40, drafter="none")
    found = model.generate(
        "the rain", max_tokens=40, prediction=plain.token_ids, drafter="prediction"
    )
    assert found.token_ids == plain.token_ids
    assert found.drafter == "prediction"
    assert found.stats.drafted_by.keys() == {"prediction"}


def test_drafting_from_a_prediction_that_is_not_there_is_a_mistake(model: Model):
    with pytest.raises(InvalidRequest, match=r"drafter suffix\+prediction needs a prediction"):
        model.generate("the rain", drafter="suffix+prediction")


def test_a_prediction_is_not_looked_at_without_drafting(model: Model):
    found = model.generate("the rain", max_tokens=5, prediction=[1, 2, 3], drafter="none")
    assert found.stats.drafted == 0
