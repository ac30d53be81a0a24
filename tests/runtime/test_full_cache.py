"""Responses that fill the KV cache: rejected before running, or ended with `length`."""

from pathlib import Path
from typing import Any

import pytest

from paceline.decoding.types import FinishReason
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.options import Options
from paceline.runtime.model import Model
from support.plain import plain, small
from support.scheduling import free_slots


def test_a_prompt_that_fills_the_cache_is_rejected_before_running(
    tiny_files: ModelFiles, cache: Path
):
    model = small(tiny_files, 96)
    free = free_slots(model)
    for length in (free, free + 1, 200):
        with pytest.raises(InvalidRequest, match="cache_tokens"):
            model.stream([5] * length, drafter="none", ignore_eos=True)
    assert free_slots(model) == free
    assert plain(model, "Hello", max_tokens=20).completion_tokens == 20


@pytest.mark.parametrize(
    ("drafter", "block", "policy"),
    [("suffix", 2, "fixed"), ("ngram:min=1", 16, "kelly"), ("auto", 32, "auto")],
)
def test_a_response_that_fills_the_cache_ends_with_length_at_the_same_token(
    drafter: str, block: int, policy: Any, full: Model, cache: Path
):
    model = full.without_history()
    free = free_slots(model)
    filled = model.generate([5] * 70, drafter="none", ignore_eos=True)
    found = model.generate(
        [5] * 70, drafter=drafter, max_block=block, policy=policy, ignore_eos=True
    )
    assert found.finish_reason is FinishReason.LENGTH
    assert found.prompt_tokens + found.completion_tokens == free
    assert found.token_ids == filled.token_ids
    assert free_slots(model) == free


@pytest.fixture(scope="module")
def full(tiny_files: ModelFiles) -> Model:
    return small(tiny_files, 96)


def test_streams_that_do_not_fit_together_all_complete(tiny_files: ModelFiles, cache: Path):
    """The unread stream releases its slots while the other one needs them."""
    model = small(tiny_files, 96)
    free = free_slots(model)
    options: Options = {"drafter": "none", "ignore_eos": True}
    expected = [plain(model, prompt, max_tokens=None, **options) for prompt in ("Hello", [5] * 70)]
    stream = model.stream("Hello", **options)
    first = next(stream)
    with model.stream([5] * 70, **options) as other:
        steps = [*other]
    assert [token for step in steps for token in step.tokens] == expected[1].token_ids
    rest = [*stream]
    assert [token for step in (first, *rest) for token in step.tokens] == expected[0].token_ids
    for one, right in zip((stream, other), expected, strict=True):
        assert one.result.token_ids == right.token_ids
        assert one.result.finish_reason is FinishReason.LENGTH
    assert stream.result.stats.preempted > 0
    assert free_slots(model) == free


def test_costs_are_measured_even_if_idle_kv_fills_the_cache(tiny_files: ModelFiles, cache: Path):
    model = small(tiny_files, 96)
    model.generate([5] * 70, drafter="none", ignore_eos=True)
    assert model.engine.free_slots < 16
    assert model.measured_costs(again=True)(1) > 0
