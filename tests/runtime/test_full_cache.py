"""A KV cache that an answer fills: refused before it runs, or ended with `length`."""

from pathlib import Path
from typing import Any

import pytest

from paceline.decoding.types import FinishReason
from paceline.errors import CacheFull
from paceline.models import ModelFiles
from paceline.runtime.model import Model
from support.plain import plain, small


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


@pytest.mark.parametrize(
    ("drafter", "block", "policy"),
    [("suffix", 2, "fixed"), ("ngram:min=1", 16, "kelly"), ("auto", 32, "auto")],
)
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
