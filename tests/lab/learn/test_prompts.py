import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest, ModelError, PacelineError
from paceline.models import QUIET, ModelFiles
from paceline.runtime.model import Model
from paceline.runtime.stream import Stream
from paceline.verify.suite import load_suite
from paceline_lab.learn.prompts import LONGEST_PROMPT, Opening, user_opening, write_prompts

END = 2  # the id of <|im_end|>


class Brief(Model):
    """Ends a text sooner than the tiny model does by itself, and counts what it was asked for."""

    likes_to_end = 2.0

    def __init__(self, model: Model) -> None:
        super().__init__(model.files, model.engine)
        self.seeds: list[int] = []

    def stream(self, prompt: Any, **options: Any) -> Stream:
        assert len(self.seeds) < 2000, "it never ends"
        self.seeds.append(options["seed"])
        return super().stream(prompt, **options, logit_bias={END: self.likes_to_end})


@pytest.fixture
def brief(model: Model) -> Brief:
    return Brief(model)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "made.jsonl"


def make(model: Model, out: Path, count: int, **options: Any) -> int:
    settings = {"seed": 0, "temperature": 0.9, "at_once": 8, "progress": QUIET, **options}
    openings = [Opening(user_opening(model.files))]
    return write_prompts(model, out, count=count, openings=openings, **settings)


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_as_many_different_prompts_as_asked_for_are_made(brief: Brief, out: Path):
    assert make(brief, out, 6) == 6
    texts = [entry["prompt"] for entry in entries(out)]
    assert len(texts) == len({*texts}) == 6
    assert all(text == text.strip() and len(text) >= 12 for text in texts)
    assert len({entry["seed"] for entry in entries(out)}) == 6


def test_a_prompt_is_the_targets_continuation_of_the_user_turn(brief: Brief, out: Path):
    make(brief, out, 4)
    for entry in entries(out):
        alone = brief.generate(
            "<|im_start|>user\n",
            raw=True,
            drafter="none",
            temperature=0.9,
            top_p=0.95,
            seed=entry["seed"],
            max_tokens=LONGEST_PROMPT,
        )
        assert alone.finish_reason == "stop", "one that was cut off is no prompt"
        assert alone.text.strip() == entry["prompt"]


def test_generated_prompts_can_be_answered(brief: Brief, out: Path):
    make(brief, out, 3)
    prompts = load_suite(out).prompts
    assert [prompt.messages[0]["content"] for prompt in prompts] == [
        entry["prompt"] for entry in entries(out)
    ]


@pytest.mark.parametrize("letter", ["\u2028", "\u2029", "\x85"])
def test_a_prompt_with_an_unusual_line_end_can_be_answered(letter: str, out: Path):
    from paceline.storage.json_lines import appending

    with appending(out) as append:
        append({"prompt": f"one{letter}two", "seed": 0})
    assert load_suite(out).prompts[0].messages[0]["content"] == f"one{letter}two"


def test_the_same_seed_makes_the_same_prompts_and_another_makes_others(
    brief: Brief, tmp_path: Path
):
    paths = [tmp_path / name for name in "abc"]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        make(brief, path, 3, seed=seed)
    first, again, other = (entries(path) for path in paths)
    assert again == first
    assert not {entry["prompt"] for entry in other} & {entry["prompt"] for entry in first}


def test_a_second_run_keeps_the_prompts_and_continues_with_new_seeds(brief: Brief, out: Path):
    make(brief, out, 3)
    before, used = out.read_bytes(), entries(out)
    brief.seeds.clear()
    assert make(brief, out, 6) == 6
    assert out.read_bytes().startswith(before)
    assert min(brief.seeds) > max(entry["seed"] for entry in used)
    assert len({entry["prompt"] for entry in entries(out)}) == 6


def test_enough_prompts_generate_no_more(brief: Brief, out: Path):
    make(brief, out, 3)
    before = out.read_bytes()
    brief.seeds.clear()
    assert make(brief, out, 2) == make(brief, out, 3) == 3
    assert out.read_bytes() == before
    assert brief.seeds == []


def test_a_stopped_run_continues(brief: Brief, out: Path, telling: Any):
    def stop(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(brief, out, 5, progress=telling(stop))
    kept = out.read_bytes()
    assert len(entries(out)) == 2
    out.write_bytes(kept + b'{"prompt": "half a li')
    assert make(brief, out, 5) == 5
    assert out.read_bytes().startswith(kept)
    assert len(entries(out)) == 5


def test_progress_reports_the_number_of_prompts(brief: Brief, out: Path, telling: Any):
    make(brief, out, 2)
    heard: list[int] = []
    progress = telling(heard.append)
    make(brief, out, 4, progress=progress)
    assert heard == [3, 4]
    ((label, total, unit),) = progress.tasks
    assert brief.files.name in label
    assert (total, unit) == (4, "prompts")


@pytest.mark.parametrize(
    "content", ['{"messages": []}\n', '{"prompt": "Hello"}\n', '{"prompt": "a", "seed": 1}\n{}\n']
)
def test_a_file_of_other_content_is_refused_and_left_as_it_is(
    content: str, brief: Brief, out: Path
):
    out.write_text(content)
    with pytest.raises(InvalidRequest, match=rf"line \d of {out}"):
        make(brief, out, 3)
    assert out.read_text() == content


@pytest.mark.parametrize(
    "content", ['{"prompt": ["Hello"], "seed": 1}\n', '{"prompt": "Hello", "seed": "7"}\n']
)
def test_a_file_of_other_types_is_refused(content: str, brief: Brief, out: Path):
    out.write_text(content)
    with pytest.raises(InvalidRequest, match=r"line 1 of .*: (prompt|seed): "):
        make(brief, out, 3)


@pytest.mark.parametrize(("temperature", "likes_to_end"), [(0.0, 2.0), (0.9, 1000.0)])
def test_a_target_without_new_prompts_is_rejected(
    temperature: float, likes_to_end: float, brief: Brief, out: Path
):
    brief.likes_to_end = likes_to_end
    with pytest.raises(PacelineError):
        make(brief, out, 3, temperature=temperature, at_once=64)


# -- where the user speaks -------------------------------------------------------------------------


def with_template(files: ModelFiles, template: str | None) -> ModelFiles:
    return replace(files, chat_template=template)


def test_the_opening_is_the_template_up_to_the_users_words(tiny_files: ModelFiles):
    assert user_opening(tiny_files) == "<|im_start|>user\n"
    template = (
        "System: be brief.\n{% for m in messages %}User: {{ m.content | trim }}\n{% endfor %}"
    )
    assert user_opening(with_template(tiny_files, template)) == "System: be brief.\nUser: "


@pytest.mark.parametrize("template", ["nothing", "{{ messages | length }}", "{{ bos_token }}"])
def test_a_template_without_the_user_message_is_rejected(
    template: str, model: Model, tiny_files: ModelFiles, out: Path
):
    other = Model(with_template(tiny_files, template), model.engine)
    with pytest.raises(ModelError, match="omits the user message"):
        make(other, out, 1)
    assert not out.exists()


def test_a_model_without_a_template_is_refused(model: Model, tiny_files: ModelFiles, out: Path):
    with pytest.raises(ModelError, match="has no chat template"):
        make(Model(with_template(tiny_files, None), model.engine), out, 1)


def test_a_template_without_an_opening_is_rejected_with_the_reason(
    model: Model, tiny_files: ModelFiles, out: Path
):
    other = Model(with_template(tiny_files, "{{ messages[0].content }}"), model.engine)
    with pytest.raises(PacelineError):
        make(other, out, 1)


def test_a_file_that_cannot_be_written_is_named(brief: Brief, tmp_path: Path):
    for out in (tmp_path / "no" / "made.jsonl", tmp_path):
        with pytest.raises(InvalidRequest, match=str(out)):
            make(brief, out, 1)
    assert brief.seeds == []
