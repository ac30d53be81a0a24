import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.storage.files import write_json
from paceline_lab.bench.record import Record, Row, here
from paceline_lab.learn.folder import TrainingAnswer
from paceline_lab.simulate.replay import Recording
from paceline_lab.simulate.texts import read_texts

Read = Callable[[list[Path]], list[Recording]]


@pytest.fixture
def texts(tiny_files: ModelFiles) -> Read:
    return partial(read_texts, files=lambda: tiny_files)


@pytest.fixture
def alone() -> Read:
    """Without a model."""

    def none() -> ModelFiles:
        raise AssertionError("token ids need no model")

    return partial(read_texts, files=none)


def lines(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def test_token_ids_are_used_unchanged(alone: Read, tmp_path: Path):
    path = lines(
        tmp_path / "a.jsonl",
        {"prompt": [1, 2], "answer": [3, 4], "id": "x", "kind": "chat"},
        {"prompt_token_ids": [1], "token_ids": [5], "finish_reason": "length"},
    )
    recordings = [Recording("x", "chat", [1, 2], [3, 4]), Recording("a:2", "any", [1], [5])]
    assert alone([path]) == recordings
    (tmp_path / "b.jsonl").write_bytes(path.read_bytes())
    again = alone([path, tmp_path / "b.jsonl"])
    assert len({recording.id for recording in again}) == 4, "no two have one name"


def test_text_is_tokenized_as_for_a_request(texts: Read, tiny_files: ModelFiles, tmp_path: Path):
    tokenizer, template = tiny_files.tokenizer, tiny_files.template
    messages = [{"role": "user", "content": "and the user"}]
    path = lines(
        tmp_path / "a.jsonl",
        {"prompt": "and the user", "answer": "this is one"},
        {"messages": messages, "answer": "this is one", "prediction": "this is"},
    )
    found = texts([path])
    prompt = tokenizer.encode(template.render(messages), special=True)
    assert [each.prompt for each in found] == [prompt, prompt]
    assert found[0].answer == tokenizer.encode("this is one")
    assert found[1].prediction == tokenizer.encode("this is")


def test_recordings_know_if_a_response_ended_naturally(alone: Read, tmp_path: Path):
    path = lines(
        tmp_path / "a.json",
        {"prompt": [1], "answer": [2, 3], "finish": "stop", "max_tokens": 9},
        {"prompt": [1], "answer": [2, 3], "finish_reason": "stop"},
        {"prompt": [1], "answer": [2, 3], "finish": "repetition"},
    )
    assert [each.max_tokens for each in alone([path])] == [9, 66, None]


def test_training_responses_are_read_as_recordings(alone: Read, tmp_path: Path):
    answer = TrainingAnswer(["Hello"], [1], [2, 3], "stop", "free", 7)
    (found,) = alone([lines(tmp_path / "answers.jsonl", asdict(answer))])
    assert (found.prompt, found.answer, found.max_tokens) == ([1], [2, 3], 66)


def test_a_result_with_token_ids_is_read_as_recordings(alone: Read, tmp_path: Path):
    facts = {"prompt_token_ids": [1, 2], "token_ids": [3, 4]}
    rows = [
        Row("a", "chat", "plain", {"ratio": [1.0]}, facts=facts),
        Row("a", "chat", "auto", {"ratio": [2.0]}, facts=facts),
        Row("b", "chat", "plain", {"ratio": [1.0]}),
    ]
    path = tmp_path / "result.json"
    write_json(path, Record("run", rows, {"max_tokens": 30}, **here()).as_dict())
    assert alone([path]) == [Recording("a", "chat", [1, 2], [3, 4], 30)]
    write_json(path, Record("run", rows[2:], **here()).as_dict())
    with pytest.raises(InvalidRequest, match="only figures"):
        alone([path])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there are no answers"),
        ("{}\n{}\n", "line 1 of .*a.jsonl: expected a prompt"),
        ("[1]\n", "line 1 of .*not a JSON object"),
        ('{"prompt": [1], "answer": [2]}\n{"prompt": [1]', "line 2 of .*a.jsonl"),
        ('{"prompt": [1, -2], "answer": [2]}\n', "neither text nor token ids"),
        ('{"messages": "hi", "answer": [2]}\n', "messages is not a list"),
        ('{"prompt": [1], "answer": [2], "finish": "stop", "max_tokens": "x"}\n', "max_tokens"),
        ("\xff", "is not UTF-8"),
    ],
)
def test_an_invalid_recording_is_a_one_line_error(
    texts: Read, tmp_path: Path, content: str, message: str
):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidRequest, match=message) as raised:
        texts([path])
    assert "\n" not in str(raised.value)
