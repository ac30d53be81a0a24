import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.verify.suite import load_suite


def test_a_suite_has_its_prompts_in_order_and_the_hash_of_its_file(suite_file: Path):
    suite = load_suite(suite_file)
    assert [(p.id, p.kind) for p in suite.prompts] == [
        ("one", "chat"),
        ("two", "code"),
        ("three", "chat"),
    ]
    assert suite.prompts[0].messages == [{"role": "user", "content": "Hello"}]
    assert suite.sha256 == sha256(suite_file.read_bytes()).hexdigest()


def test_our_suite_is_complete():
    suite = load_suite()
    ids = [prompt.id for prompt in suite.prompts]
    assert len({*ids}) == len(ids) >= 24
    for prompt in suite.prompts:
        assert prompt.kind
        assert prompt.messages[-1]["role"] == "user"
        assert all(message["content"].strip() for message in prompt.messages)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        json.dumps({"id": "a", "kind": "b"}),
        json.dumps({"kind": "b", "messages": []}),
        json.dumps({"messages": [{"role": "user"}]}),
        json.dumps({"prompt": 5}),
        "[" * 100_000,
    ],
)
def test_an_invalid_prompt_line_is_reported_with_its_number(line: str, suite_file: Path):
    first = suite_file.read_text().splitlines()[0]
    suite_file.write_text(f"{first}\n\n{line}\n")
    with pytest.raises(InvalidRequest, match="line 3 of ") as caught:
        load_suite(suite_file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *(("", "prompts.jsonl"), ("\n \n", "prompts.jsonl")),
        ('{"id": "a", "prompt": "Hello"}\n' * 2, "two prompts have the id 'a'"),
    ],
)
def test_a_suite_without_prompts_or_with_two_of_an_id_is_rejected(
    content: str, reason: str, tmp_path: Path
):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=reason):
        load_suite(path)


def test_an_unreadable_suite_is_reported(tmp_path: Path):
    paths: list[Any] = [tmp_path / "nothing.jsonl", tmp_path]
    for path in paths:
        with pytest.raises(InvalidRequest, match=f"{path}"):
            load_suite(path)


def test_a_prompt_may_be_only_the_users_text(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello"}\n')
    (prompt,) = load_suite(path).prompts
    assert (prompt.id, prompt.kind) == ("1", "any")
    assert prompt.messages == [{"role": "user", "content": "Hello"}]
