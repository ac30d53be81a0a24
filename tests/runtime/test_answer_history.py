"""Answer history: its contents, drafts from it, and errors while saving it."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.decoding.types import FinishReason
from paceline.drafters import DrafterSpec
from paceline.models import Progress
from paceline.options import GREEDY, Options
from paceline.runtime import kept as kept_module
from paceline.runtime.drafting import Drafting
from paceline.runtime.kept import KeptAnswers, all_kept
from paceline.runtime.model import Model
from support.scheduling import Submitted, end_scheduler

PROMPT = "the rain in the rain in the rain in the"
ANSWER: Options = {**GREEDY, "max_tokens": 40, "ignore_eos": True, "drafter": "auto"}
VOCAB = 50


def ended(answer: list[int], reason: FinishReason = FinishReason.STOP) -> Any:
    return SimpleNamespace(token_ids=answer, finish_reason=reason)


@pytest.fixture
def said() -> StringIO:
    return StringIO()


@pytest.fixture
def kept(tmp_path: Path, said: StringIO, monkeypatch: pytest.MonkeyPatch) -> KeptAnswers:
    monkeypatch.setattr(kept_module, "due", lambda tokens, counted: tokens > counted)
    return opened(tmp_path, said)


def opened(folder: Path, said: StringIO, model: str = "toy") -> KeptAnswers:
    return KeptAnswers(model, model * 8, VOCAB, Progress(said), folder)


def lines_of(folder: Path) -> list[Any]:
    path = log_of(folder)
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_a_response_is_saved_without_its_prompt_and_used_by_the_next_process(
    kept: KeptAnswers, tmp_path: Path, said: StringIO
):
    assert kept.text is None
    kept.add(ended([*range(20)]))
    kept.flush()
    assert lines_of(tmp_path) == [[*range(20)]]
    for each in (kept, opened(tmp_path, said)):
        assert each.text is not None
        assert each.text.match([*range(10)]) is not None
    assert said.getvalue().count("\n") == 1  # it is said once, where they are kept


def test_repetitive_responses_are_not_saved(kept: KeptAnswers, tmp_path: Path):
    kept.add(ended([1]))
    kept.add(ended([1, 2, 3, 4] * 16, FinishReason.LENGTH))
    kept.add(ended([*range(9)], FinishReason.REPETITION))
    kept.add(ended([*range(9)], FinishReason.LENGTH))
    assert lines_of(tmp_path) == [[*range(9)]]


def log_of(folder: Path) -> Path:
    (path,) = folder.glob("*/answers.jsonl")
    return path


def test_invalid_history_lines_do_not_affect_the_rest(
    kept: KeptAnswers, tmp_path: Path, said: StringIO
):
    kept.add(ended([*range(20)]))
    kept.flush()
    path = log_of(tmp_path)
    lines = b"[1,2,3,4,5,6,7,8,50]\n[1,true]\n[-1,2]\n[0.5]\n[1,2,3"  # 50: not in the vocabulary
    path.write_bytes(path.read_bytes() + b"\n" + lines)
    other = opened(tmp_path, said)
    other.add(ended([*range(20, 40)]))
    other.flush()
    assert other.text is not None
    assert other.text.match([*range(20, 30)]) is not None
    assert max(other.text._columns["text"]) == VOCAB  # the end of an answer


def test_several_models_may_save_and_count_concurrently(
    tmp_path: Path, said: StringIO, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kept_module, "due", lambda *_: True)

    def keep(first: int) -> None:
        own = opened(tmp_path, said)
        for at in range(50):
            own.add(ended([first, at] * 100))
        own.flush()

    threads = [threading.Thread(target=keep, args=(each,)) for each in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert "not saved" not in said.getvalue()
    answers = [line for line in lines_of(tmp_path) if isinstance(line, list)]
    assert len(answers) == 200
    assert all(len(answer) == 200 for answer in answers)


def test_the_oldest_responses_are_dropped(
    kept: KeptAnswers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kept_module, "MAX_TOKENS", 40)
    for first in range(0, 30, 3):
        kept.add(ended([*range(first, first + 10)]))
        kept.flush()
    found = lines_of(tmp_path)
    assert 3 <= len(found) <= 5
    assert found[-1] == [*range(27, 37)]
    assert kept.text is not None
    assert kept.text.match([*range(27, 35)])
    assert not kept.text.match([*range(8)])


def test_corrupt_counts_are_ignored_with_a_warning_and_rebuilt(
    kept: KeptAnswers, tmp_path: Path, said: StringIO
):
    kept.add(ended([*range(20)]))
    kept.flush()
    (path,) = tmp_path.glob("*/counts.npz")
    path.write_bytes(path.read_bytes()[:-80])
    other = opened(tmp_path, said)
    assert other.text is None
    assert "it is ignored" in said.getvalue()
    other.add(ended([*range(20, 40)]))
    other.flush()
    assert opened(tmp_path, said).text is not None


@pytest.mark.parametrize("where", ["write", "cut short", "open", "counts"])
def test_a_full_disk_is_a_one_line_warning_and_responses_continue(
    kept: KeptAnswers, said: StringIO, where: str, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    kept.add(ended([1, 2]))
    kept.flush()
    before = said.getvalue()
    if where == "counts":
        monkeypatch.setattr(kept_module.KeptText, "write", full)
    elif where == "cut short":
        monkeypatch.setattr(os, "write", lambda *_: 3)
    else:
        monkeypatch.setattr(os, where, full)
    for _ in range(3):
        kept.add(ended([3, 4]))
        kept.flush()
    monkeypatch.undo()
    assert said.getvalue().removeprefix(before).count("No space left on device") == 1


@pytest.fixture
def keeping(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(kept_module, "due", lambda tokens, counted: tokens > counted)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    keeping = Model(model.files, model.engine, drafting=Drafting(model.files, keep=True))
    yield keeping
    end_scheduler(keeping)


def test_a_model_drafts_from_its_answer_history_with_the_same_output(keeping: Model, model: Model):
    plain = model.generate(PROMPT, **{**ANSWER, "drafter": "none"})
    first = keeping.generate(PROMPT, **ANSWER)
    keeping.flush()
    second = keeping.generate(PROMPT, **ANSWER)
    assert plain.token_ids == first.token_ids == second.token_ids
    assert (first.drafter, second.drafter) == ("suffix", "suffix+kept")
    assert second.stats.accepted > 0
    alone = keeping.generate(PROMPT, **{**ANSWER, "drafter": "kept"})
    assert alone.token_ids == plain.token_ids
    assert alone.stats.accepted > 10


def test_a_salted_request_neither_saves_nor_uses_the_answer_history(keeping: Model):
    with closing(keeping.open_scheduler()) as scheduler:
        scheduler.start()
        salted = Submitted(keeping, PROMPT, salt="a", **ANSWER).result()
        assert all_kept() == []
        first = Submitted(keeping, PROMPT, **ANSWER).result()
        assert len(all_kept()) == 1
        keeping.flush()
        second = Submitted(keeping, PROMPT, **ANSWER).result()
        again = Submitted(keeping, PROMPT, salt="a", **ANSWER).result()
        named: Options = {**ANSWER, "drafter": "kept"}  # as the server may have been started with
        assert Submitted(keeping, PROMPT, **named).result().stats.drafted > 0
        assert Submitted(keeping, PROMPT, salt="a", **named).result().stats.drafted == 0
    drafters = [item.drafter for item in (salted, first, second, again)]
    assert drafters == ["suffix", "suffix", "suffix+kept", "suffix"]
    assert salted.token_ids == first.token_ids == second.token_ids == again.token_ids


def test_failed_responses_are_not_saved(keeping: Model):
    learned = keeping.drafting.acceptance
    answer: Any = SimpleNamespace(
        failed=True,
        result=ended([1, 2, 3]),
        drafters=SimpleNamespace(acceptance=learned),
        request=SimpleNamespace(drafter=DrafterSpec(), private=False),
    )
    keeping.drafting.learn(answer)
    assert all_kept() == []


def test_saved_responses_are_listed_and_deleted(keeping: Model):
    assert all_kept() == []
    keeping.generate(PROMPT, **ANSWER)
    keeping.flush()
    (kept,) = all_kept()
    assert kept.model == keeping.files.name
    assert kept.bytes > 100
    (kept.paths[0] / ".counts.npz.1").symlink_to("replaced while they are listed")
    assert all_kept() == [kept]
    (kept.paths[0] / "model.json").unlink()
    log = kept.paths[0] / "answers.jsonl"  # as an earlier checkout left it
    log.write_text('{"model": "an earlier one"}\n' + log.read_text())
    assert [one.model for one in all_kept()] == ["an earlier one"]
    kept.remove()
    assert all_kept() == []
    keeping.generate(PROMPT, **ANSWER)  # it may still draft from memory
    keeping.flush()
    assert all_kept() == []
