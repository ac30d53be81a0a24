"""Prompts of a length, and questions behind other text."""

from pathlib import Path

import pytest

from paceline.errors import InvalidRequest
from paceline.runtime.model import Model
from paceline.verify.suite import load_suite
from paceline_lab.sweep.cases import default_lengths, depth_cases, length_cases, max_context

TEXT = "this is one and the user\n"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(100, ["max"]), (101, [100, "max"]), (8112, [100, 200, 372, 800, 1600, 3200, 6400, "max"])],
)
def test_lengths_are_the_experiments_then_doubled_to_the_maximum(limit: int, expected: list[int]):
    assert default_lengths(limit) == expected


def test_a_prompt_repeats_the_text_up_to_its_length(model: Model):
    once = model.tokens(TEXT, raw=True)
    cases = length_cases(model, TEXT, [3, 100], 8)
    assert [len(case.prompt) for case in cases] == [3, 100]
    assert cases[0].prompt == once[:3]
    assert cases[1].prompt == (once * 100)[:100]
    assert [case.at for case in cases] == [{"prompt_tokens": 3}, {"prompt_tokens": 100}]
    assert cases[0].options == {"max_tokens": 8, "ignore_eos": True}


def test_max_length_leaves_room_for_the_response(model: Model):
    (case,) = length_cases(model, TEXT, ["max"], 8)
    assert len(case.prompt) == max_context(model) - 8
    result = model.generate(case.prompt, **case.options, drafter="suffix", policy="fixed")
    assert result.completion_tokens == 8


def test_a_prompt_beyond_the_context_is_rejected_with_its_length(model: Model):
    most = max_context(model) - 8
    with pytest.raises(InvalidRequest, match=f"{most + 1} tokens"):
        length_cases(model, TEXT, [most + 1], 8)
    with pytest.raises(InvalidRequest, match="9999"):
        length_cases(model, TEXT, [], 9999)


def test_questions_follow_other_text(model: Model, suite_file: Path):
    suite = load_suite(suite_file)
    cases = depth_cases(model, suite, [0, 100], 8)
    assert [case.id for case in cases[:3]] == [
        f"{prompt.id} behind 0 tokens" for prompt in suite.prompts
    ]
    for prompt, near, far in zip(suite.prompts, cases[:3], cases[3:], strict=True):
        assert near.prompt == prompt.messages
        assert far.prompt[-1]["content"].endswith(f"\n\n{prompt.messages[-1]['content']}")  # type: ignore[index]
        more = len(model.tokens(far.prompt)) - len(model.tokens(near.prompt))
        assert 95 <= more <= 115
        assert "ignore_eos" not in far.options


def test_the_maximum_depth_leaves_room_for_question_and_answer(model: Model, suite_file: Path):
    suite = load_suite(suite_file)
    for case in depth_cases(model, suite, ["max"], 8):
        assert max_context(model) - 150 < len(model.tokens(case.prompt)) < max_context(model) - 8
    with pytest.raises(InvalidRequest, match="99999 tokens"):
        depth_cases(model, suite, [99999], 8)
