"""Answers to learn from: what one is, their file, and a run that was stopped and continues."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest, PacelineError
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.runtime.stream import Stream
from paceline_lab.learn.answers import Settings
from support.training import LOOPS, SHORT, WORDS, Asked, alone, answers_in, make, other_weights

# -- what an answer is -----------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 9])
def test_answers_equal_those_of_each_prompt_alone(
    at_once: int, model: Model, prompts: Path, out: Path
):
    answers = make(model, prompts, out, at_once=at_once)
    assert [*answers] == [*range(len(WORDS))]
    for number, word in enumerate(WORDS):
        assert answers[number].prompt == model.tokens(word)
        assert answers[number].answer == alone(model, word).token_ids
        assert answers[number].tokens == [*answers[number].prompt, *answers[number].answer]
        assert answers[number].finish == "length"


def test_answers_in_calls_of_one_row_equal_the_targets(
    tiny_gguf: Path, cache: Path, prompts: Path, out: Path
):
    single = load(tiny_gguf, rows=1, cache_tokens=512)
    answers = make(single, prompts, out, at_once=1)
    for number, word in enumerate(WORDS):
        assert answers[number].answer == alone(single, word).token_ids


def test_temperatures_alternate_by_prompt_and_each_is_asked_for(
    model: Model, prompts: Path, out: Path
):
    asked: list[dict[str, Any]] = []

    class Watched(Model):
        def stream(self, prompt: Any, **options: Any) -> Stream:
            asked.append(options)
            return super().stream(prompt, **options)

    temperatures = (0.0, 0.7, 1.3)
    settings = Settings(max_tokens=12, temperatures=temperatures, seed=5)
    answers = make(Watched(model.files, model.engine), prompts, out, settings)
    for number, word in enumerate(WORDS):
        expected = alone(model, word, temperature=temperatures[number % 3], seed=5 + number)
        assert answers[number].answer == expected.token_ids
    assert {options["temperature"] for options in asked} == {*temperatures}
    assert {options["generation_config"] for options in asked} == {"none"}


def test_another_seed_gives_other_answers_where_they_are_sampled(
    model: Model, prompts: Path, tmp_path: Path
):
    settings = Settings(max_tokens=12, temperatures=(0.0, 1.0))
    one = make(model, prompts, tmp_path / "one", settings)
    two = make(model, prompts, tmp_path / "two", replace(settings, seed=99))
    same = [one[number] == two[number] for number in range(len(WORDS))]
    assert same == [True, False, True, False, True]


def test_a_prompt_that_is_there_twice_counts_once(model: Model, write_prompts_file: Any, out: Path):
    answers = make(model, write_prompts_file("Hello", "a", "Hello", "the"), out)
    words = {0: "Hello", 1: "a", 3: "the"}
    assert {number: answer.prompt for number, answer in answers.items()} == {
        number: model.tokens(word) for number, word in words.items()
    }


def test_chats_are_prompts_too(model: Model, tmp_path: Path, out: Path):
    messages = [
        {"role": "system", "content": "Be"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "and"},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    answers = make(model, tmp_path / "chats.jsonl", out)
    assert answers[0].prompt == model.tokens(messages)
    assert answers[0].answer == alone(model, messages).token_ids


def test_a_prompt_that_is_too_long_for_the_settings_or_the_context_is_left_out(
    model: Model, write_prompts_file: Any, out: Path, tmp_path: Path
):
    prompts = write_prompts_file("Hello", "x " * 260, "a")
    assert model.engine.context_length <= len(model.tokens("x " * 260)) <= SHORT.longest_prompt
    assert [*make(model, prompts, out)] == [0, 2]
    longest = len(model.tokens("a"))
    settings = Settings(max_tokens=12, longest_prompt=longest)
    assert [*make(model, prompts, tmp_path / "short", settings)] == [2]


def test_an_answer_that_repeats_itself_ends_early(model: Model, write_prompts_file: Any, out: Path):
    answers = make(model, write_prompts_file(*LOOPS, "Hello"), out, Settings(max_tokens=160))
    for number, (word, length) in enumerate(LOOPS.items()):
        whole = alone(model, word, max_tokens=160).token_ids
        assert len(whole) == 160
        assert answers[number].answer == whole[:length]
        assert answers[number].finish == "loop"
        tail = whole[length - 32 : length]
        assert any(whole[at : at + 32] == tail for at in range(length - 32)), "it stood there"
    assert answers[2].answer == alone(model, "Hello", max_tokens=160).token_ids
    assert answers[2].finish == "length"


def test_an_answer_that_ends_where_it_begins_to_repeat_itself_has_its_length(
    model: Model, write_prompts_file: Any, out: Path
):
    answers = make(model, write_prompts_file("banana"), out, Settings(max_tokens=64))
    assert answers[0].finish == "length"


def test_an_answer_that_the_target_ends_has_its_end_token(model: Model, prompts: Path, out: Path):
    answers = make(Asked(model, logit_bias={2: 1000.0}), prompts, out).values()
    assert {tuple(answer.answer) for answer in answers} == {(2,)}
    assert {answer.finish for answer in answers} == {"stop"}


def test_progress_reports_each_answer(model: Model, prompts: Path, out: Path, telling: Any):
    heard: list[int] = []
    progress = telling(heard.append)
    make(model, prompts, out, progress=progress)
    assert heard == [1, 2, 3, 4, 5]
    ((label, total, unit),) = progress.tasks
    assert model.files.name in label
    assert (total, unit) == (5, "answers")


# -- stopped, and gone on with ---------------------------------------------------------------------


def check_goes_on(model: Model, prompts: Path, out: Path, whole: Path) -> None:
    """What a stopped run left must be gone on with, and end as `whole`."""
    assert not out.exists(), "it has its name when it is whole"
    done = answers_in(out)
    asked = Asked(model)
    answers = make(asked, prompts, out)
    assert out.is_file()
    assert not {*map(tuple, asked.prompts)} & {tuple(answer.prompt) for answer in done.values()}
    assert len(asked.prompts) == len(WORDS) - len(done), "nothing is made again"
    assert answers == make(model, prompts, whole)


@pytest.mark.parametrize("at", [1, 3])
def test_a_run_stopped_between_answers_continues(
    at: int, model: Model, prompts: Path, out: Path, tmp_path: Path, telling: Any
):
    def stop(done: int) -> None:
        if done == at:
            raise KeyboardInterrupt

    free = model.engine.free_slots
    with pytest.raises(KeyboardInterrupt):
        make(model, prompts, out, progress=telling(stop))
    assert model.engine.free_slots == free
    assert len(answers_in(out)) == at
    check_goes_on(model, prompts, out, tmp_path / "whole")


@pytest.mark.parametrize("at", [0, 4])
def test_a_run_stopped_when_a_stream_opens_continues(
    at: int, model: Model, prompts: Path, out: Path, tmp_path: Path
):
    free = model.engine.free_slots
    with pytest.raises(KeyboardInterrupt):
        make(Asked(model, stop_at=at), prompts, out, at_once=2)
    assert model.engine.free_slots == free
    check_goes_on(model, prompts, out, tmp_path / "whole")


def test_a_run_stopped_within_a_call_continues(
    model: Model, prompts: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    step, left = type(model.engine).step, [5]

    def stopping(*arguments: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return step(*arguments)

    free = model.engine.free_slots
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(model.engine), "step", stopping)
        make(model, prompts, out)
    assert model.engine.free_slots == free
    check_goes_on(model, prompts, out, tmp_path / "whole")


def test_a_torn_last_answer_is_made_again(model: Model, prompts: Path, out: Path, tmp_path: Path):
    whole = make(model, prompts, tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    out.with_name(f"{out.name}.journal").write_bytes(content[:-5])
    asked = Asked(model)
    assert make(asked, prompts, out) == whole
    assert len(asked.prompts) == 1


def test_a_finished_run_makes_nothing_again(model: Model, prompts: Path, out: Path):
    before = make(model, prompts, out)
    asked = Asked(model)
    assert make(asked, prompts, out) == before
    assert asked.prompts == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("max_tokens", {"max_tokens": 13}),
        ("temperatures", {"temperatures": (0.0, 0.5)}),
        ("seed", {"seed": 1}),
        ("longest_prompt", {"longest_prompt": 99}),
    ],
)
def test_other_settings_than_it_was_begun_with_are_refused(
    name: str, change: Any, model: Model, prompts: Path, out: Path
):
    with pytest.raises(KeyboardInterrupt):
        make(Asked(model, stop_at=3), prompts, out, at_once=1)
    before = answers_in(out)
    with pytest.raises(InvalidRequest, match=f"another {name} "):
        make(model, prompts, out, replace(SHORT, **change))
    assert answers_in(out) == before


def test_other_prompts_and_other_weights_than_it_was_begun_with_are_refused(
    model: Model, prompts: Path, out: Path, write_prompts_file: Any
):
    with pytest.raises(KeyboardInterrupt):
        make(Asked(model, stop_at=3), prompts, out, at_once=1)
    with pytest.raises(InvalidRequest, match="another fingerprint "):
        make(other_weights(model), prompts, out)
    write_prompts_file(*WORDS[:-1], "other")
    with pytest.raises(InvalidRequest, match="another prompts "):
        make(model, prompts, out)


@pytest.mark.parametrize(
    "line", ['{"prompt": [1], "answer": [2]}', '{"number": "0", "prompt": 1, "answer": 2}', "[]"]
)
def test_a_line_that_is_no_answer_is_named(line: str, model: Model, prompts: Path, out: Path):
    make(model, prompts, out)
    with out.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(PacelineError, match=f"line {len(WORDS) + 2} of {out}"):
        answers_in(out)


def test_prompts_that_cannot_be_read_are_named(model: Model, tmp_path: Path, out: Path):
    with pytest.raises(InvalidRequest, match=f"{tmp_path / 'none.jsonl'}"):
        make(model, tmp_path / "none.jsonl", out)
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_cannot_be_written_is_named(model: Model, prompts: Path, tmp_path: Path):
    with pytest.raises(PacelineError, match="nowhere"):
        make(model, prompts, tmp_path / "nowhere" / "answers")


@pytest.mark.parametrize("change", [{"temperatures": (-1.0,)}, {"seed": -1}, {"max_tokens": 0}])
def test_settings_that_cannot_be_served_leave_nothing_begun(
    change: Any, model: Model, prompts: Path, out: Path
):
    with pytest.raises(InvalidRequest):
        make(model, prompts, out, replace(SHORT, **change))
    assert len(make(model, prompts, out)) == len(WORDS)
