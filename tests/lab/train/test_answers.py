"""`train answers`: what an answer is, its folder, and a run that was stopped and continues."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import InvalidRequest, PacelineError
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.storage.manifest import MANIFEST, write_manifest
from paceline_lab.train.answers import (
    ANSWERS,
    Settings,
)
from support.training import LOOPS, SHORT, WORDS, Asked, alone, entries, make, other_weights

# -- what an answer is -----------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_answers_equal_those_of_each_prompt_alone(
    at_once: int, model: Model, prompts: Path, out: Path
):
    make(model, prompts, out, at_once=at_once)
    found = entries(out)
    assert sorted(found) == [*range(len(WORDS))]
    for number, word in enumerate(WORDS):
        assert found[number]["prompt"] == model.tokens(word)
        assert found[number]["answer"] == alone(model, word).token_ids
        assert found[number]["finish"] == "length"


def test_answers_in_calls_of_one_row_equal_the_targets(
    tiny_gguf: Path, cache: Path, prompts: Path, out: Path
):
    single = load(tiny_gguf, rows=1, cache_tokens=512)
    make(single, prompts, out, at_once=1)
    for number, word in enumerate(WORDS):
        assert entries(out)[number]["answer"] == alone(single, word).token_ids


def test_temperatures_alternate_by_prompt(model: Model, prompts: Path, out: Path):
    temperatures = (0.0, 0.7, 1.3)
    make(model, prompts, out, Settings(max_tokens=12, temperatures=temperatures, seed=5))
    for number, word in enumerate(WORDS):
        expected = alone(model, word, temperature=temperatures[number % 3], seed=5 + number)
        assert entries(out)[number]["answer"] == expected.token_ids


def test_another_seed_gives_other_answers_where_they_are_sampled(
    model: Model, prompts: Path, tmp_path: Path
):
    settings = Settings(max_tokens=12, temperatures=(0.0, 1.0))
    make(model, prompts, tmp_path / "one", settings)
    make(model, prompts, tmp_path / "two", replace(settings, seed=99))
    same = [
        entries(tmp_path / "one")[number] == entries(tmp_path / "two")[number]
        for number in range(len(WORDS))
    ]
    assert same == [True, False, True, False, True]


def test_a_prompt_in_several_files_counts_once(model: Model, write_prompts_file: Any, out: Path):
    first = write_prompts_file("Hello", "a", "Hello", name="first.jsonl")
    second = write_prompts_file("the", "a", name="second.jsonl")
    manifest = make(model, [first, second], out)
    assert manifest["answers"] == 3
    found = {number: entry["prompt"] for number, entry in entries(out).items()}
    assert found == {0: model.tokens("Hello"), 1: model.tokens("a"), 3: model.tokens("the")}


def test_chats_are_prompts_too(model: Model, tmp_path: Path, out: Path):
    messages = [
        {"role": "system", "content": "Be"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "and"},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    make(model, tmp_path / "chats.jsonl", out)
    assert entries(out)[0]["prompt"] == model.tokens(messages)
    assert entries(out)[0]["answer"] == alone(model, messages).token_ids


def test_a_prompt_that_is_too_long_is_left_out(model: Model, prompts: Path, out: Path):
    lengths = [len(model.tokens(word)) for word in WORDS]
    longest = sorted(lengths)[-3]
    make(model, prompts, out, Settings(max_tokens=12, longest_prompt=longest))
    kept = [number for number, length in enumerate(lengths) if length <= longest]
    assert sorted(entries(out)) == kept
    assert len(kept) == len(WORDS) - 2


def test_a_prompt_that_the_context_cannot_hold_is_left_out(
    model: Model, write_prompts_file: Any, out: Path
):
    prompts = write_prompts_file("Hello", "x " * 260, "a")
    assert model.engine.context_length <= len(model.tokens("x " * 260)) <= SHORT.longest_prompt
    assert make(model, prompts, out)["answers"] == 2


def test_an_answer_that_repeats_itself_ends_early(model: Model, write_prompts_file: Any, out: Path):
    make(model, write_prompts_file(*LOOPS, "Hello"), out, Settings(max_tokens=160))
    found = entries(out)
    for number, (word, length) in enumerate(LOOPS.items()):
        whole = alone(model, word, max_tokens=160).token_ids
        assert len(whole) == 160
        assert found[number]["answer"] == whole[:length]
        assert found[number]["finish"] == "loop"
        tail = whole[length - 32 : length]
        assert any(whole[at : at + 32] == tail for at in range(length - 32)), "it stood there"
    assert found[2]["answer"] == alone(model, "Hello", max_tokens=160).token_ids
    assert found[2]["finish"] == "length"


def test_an_answer_that_ends_where_it_begins_to_repeat_itself_has_its_length(
    model: Model, write_prompts_file: Any, out: Path
):
    make(model, write_prompts_file("banana"), out, Settings(max_tokens=64))
    assert entries(out)[0]["finish"] == "length"


def test_an_answer_that_the_target_ends_has_its_end_token(model: Model, prompts: Path, out: Path):
    brief = Asked(model, logit_bias={2: 1000.0})
    make(brief, prompts, out)
    assert {tuple(entry["answer"]) for entry in entries(out).values()} == {(2,)}
    assert {entry["finish"] for entry in entries(out).values()} == {"stop"}


# -- the folder ------------------------------------------------------------------------------------


def test_the_manifest_has_target_prompts_and_settings(model: Model, prompts: Path, out: Path):
    settings = Settings(max_tokens=12, temperatures=(0.0, 0.5), seed=3, longest_prompt=99)
    manifest = make(model, prompts, out, settings)
    assert json.loads((out / MANIFEST).read_text()) == manifest
    found = entries(out).values()
    assert manifest == {
        "kind": "paceline answers",
        "version": 1,
        "paceline": paceline.__version__,
        "target": model.files.name,
        "fingerprint": model.files.fingerprint,
        "prompts": [
            {
                "name": prompts.name,
                "sha256": sha256(prompts.read_bytes()).hexdigest(),
                "prompts": len(WORDS),
            }
        ],
        "max_tokens": 12,
        "temperatures": [0.0, 0.5],
        "seed": 3,
        "longest_prompt": 99,
        "complete": True,
        "answers": len(WORDS),
        "prompt_tokens": sum(len(entry["prompt"]) for entry in found),
        "answer_tokens": sum(len(entry["answer"]) for entry in found),
        "sha256": sha256((out / ANSWERS).read_bytes()).hexdigest(),
    }
    assert {path.name for path in out.iterdir()} == {ANSWERS, MANIFEST}


def test_two_files_of_one_name_are_both_in_the_manifest(
    model: Model, write_prompts_file: Any, out: Path
):
    first = write_prompts_file("Hello", name="a/prompts.jsonl")
    second = write_prompts_file("the", name="b/prompts.jsonl")
    manifest = make(model, [first, second], out)
    assert manifest["answers"] == 2
    assert [file["prompts"] for file in manifest["prompts"]] == [1, 1]


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
    """What a stopped run left in `out` must be gone on with, and end as `whole`."""
    kept = (out / ANSWERS).read_bytes() if (out / ANSWERS).exists() else b""
    assert not json.loads((out / MANIFEST).read_text())["complete"]
    done = entries(out) if kept else {}
    asked = Asked(model)
    manifest = make(asked, prompts, out)
    assert (out / ANSWERS).read_bytes().startswith(kept)
    assert not {*map(tuple, asked.prompts)} & {tuple(entry["prompt"]) for entry in done.values()}
    assert len(asked.prompts) == len(WORDS) - len(done), "nothing is made again"
    make(model, prompts, whole)
    assert entries(out) == entries(whole)
    assert manifest == json.loads((out / MANIFEST).read_text())
    assert manifest["complete"]
    assert manifest["sha256"] == sha256((out / ANSWERS).read_bytes()).hexdigest()


@pytest.mark.parametrize("at", [1, 3, 5])
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
    assert len(entries(out)) == at
    check_goes_on(model, prompts, out, tmp_path / "whole")


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_run_stopped_when_a_stream_opens_continues(
    at: int, model: Model, prompts: Path, out: Path, tmp_path: Path
):
    free = model.engine.free_slots
    with pytest.raises(KeyboardInterrupt):
        make(Asked(model, stop_at=at), prompts, out, at_once=2)
    assert model.engine.free_slots == free
    check_goes_on(model, prompts, out, tmp_path / "whole")


@pytest.mark.parametrize("calls", [0, 5, 20])
def test_a_run_stopped_within_a_call_continues(
    calls: int,
    model: Model,
    prompts: Path,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    step, left = type(model.engine).step, [calls]

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
    make(model, prompts, out)
    make(model, prompts, tmp_path / "whole")
    content = (out / ANSWERS).read_bytes()
    (out / ANSWERS).write_bytes(content[:-5])
    asked = Asked(model)
    make(asked, prompts, out)
    assert len(asked.prompts) == 1
    assert entries(out) == entries(tmp_path / "whole")


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
    make(model, prompts, out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(InvalidRequest, match=f"{out} has answers with another {name} "):
        make(model, prompts, out, replace(SHORT, **change))
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_other_prompts_than_it_was_begun_with_are_refused(
    model: Model, prompts: Path, out: Path, write_prompts_file: Any
):
    make(model, prompts, out)
    more = write_prompts_file("more", name="more.jsonl")
    with pytest.raises(InvalidRequest, match="answers with another prompts "):
        make(model, [prompts, more], out)
    write_prompts_file(*WORDS[:-1], "other")
    with pytest.raises(InvalidRequest, match="answers with another prompts "):
        make(model, prompts, out)


def test_another_target_than_it_was_begun_with_is_refused(model: Model, prompts: Path, out: Path):
    make(model, prompts, out)
    with pytest.raises(InvalidRequest, match="answers with another fingerprint "):
        make(other_weights(model), prompts, out)


def test_a_folder_of_another_kind_is_refused(model: Model, prompts: Path, out: Path):
    out.mkdir()
    write_manifest(out, "paceline table", {}, [])
    with pytest.raises(InvalidRequest, match=f"{out} holds a paceline table"):
        make(model, prompts, out)


def test_prompts_that_cannot_be_read_are_named(model: Model, tmp_path: Path, out: Path):
    with pytest.raises(InvalidRequest, match=f"{tmp_path / 'none.jsonl'}"):
        make(model, tmp_path / "none.jsonl", out)
    assert not out.exists()


@pytest.mark.parametrize("name", ["file", "file/answers"])
def test_a_folder_that_cannot_be_made_is_refused(
    name: str, model: Model, prompts: Path, tmp_path: Path
):
    (tmp_path / "file").write_text("")
    with pytest.raises(PacelineError, match="file"):
        make(model, prompts, tmp_path / name)


@pytest.mark.parametrize("change", [{"temperatures": (-1.0,)}, {"seed": -1}, {"max_tokens": 0}])
def test_settings_that_cannot_be_served_leave_no_folder_begun(
    change: Any, model: Model, prompts: Path, out: Path
):
    with pytest.raises(InvalidRequest):
        make(model, prompts, out, replace(SHORT, **change))
    assert make(model, prompts, out)["answers"] == len(WORDS)
