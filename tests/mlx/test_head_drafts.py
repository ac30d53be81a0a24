"""Heads match recordings for any chunking of rows; state that their drafters keep per request.

Where nothing is recorded, drafts are compared with those of a fresh cache that gets all its rows at
once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.sampling import Sampling
from paceline.decoding.types import ComputedBlock
from paceline.drafters import DraftKV, RequestContext, create
from paceline.drafters.heads import DraftCost
from paceline_mlx.heads import drafter as module
from paceline_mlx.heads.drafter import DFlashDrafter, MtpDrafter
from support import mlx
from support.dflash import random_weights, tiny_config
from support.heads import (
    BLOCKS,
    CHAINED,
    CHAINS,
    DRAFTS,
    GREEDY,
    Head,
    Recorded,
    Text,
    assert_same,
    sampler,
    shared,
)

pytestmark = pytest.mark.mlx

Make = Callable[[str], Head]


@pytest.fixture(scope="module")
def head_of(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, Head] = {}

    def head_of(form: str) -> Head:
        if form not in made:
            folder = tmp_path_factory.mktemp("head")
            blocks = BLOCKS | CHAINED
            if form in blocks:
                made[form] = Head.block(folder, blocks[form])
            else:
                made[form] = Head.chain(folder, CHAINS[form])
        return made[form]

    return head_of


@pytest.fixture(params=["two layers", "eagle3", "qwen3_5"])
def head(request: pytest.FixtureRequest, head_of: Make) -> Head:
    return head_of(request.param)


@pytest.fixture(autouse=True)
def whole_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads give every token a small probability."""
    monkeypatch.setattr(module, "MIN_CHANCE", 0.0)


# -- output of the network -------------------------------------------------------------------------

GAPS = (10, 90)
"""Where the halves of 30 rows begin in the last of the recorded drafts."""


@pytest.mark.parametrize("form", BLOCKS | CHAINED)
def test_a_drafted_block_matches_the_recording(form: str, head_of: Make):
    head, recorded = head_of(form), Recorded(form)
    text = head.text(100)
    for at, (length, token, position) in enumerate(recorded["asked"].tolist()):
        parts = [text.rows(0, length)]
        if position != length:
            first, second = GAPS
            parts = [text.rows(0, 15, first), text.rows(15, 30, second - 15)]
        expected = recorded["tokens"][at], recorded["chances"][at]
        assert_same(head.drafted(*parts, token=token), expected)
    for token, *picked in recorded["picked"].tolist():
        drafts, _ = head.drafted(text.rows(0, 30), token=token, sampler=sampler())
        assert drafts == picked


@pytest.mark.parametrize("form", CHAINS)
def test_a_drafted_chain_matches_the_recording(form: str, head_of: Make):
    head, recorded = head_of(form), Recorded(form)
    for at, (length, seed) in enumerate(zip((1, 2, 40, 12), recorded["seeds"], strict=True)):
        text = head.text(length, int(seed))
        parts = [text.rows()] if length != 12 else [text.rows(0, 6), text.rows(6, 12, 4)]
        expected = recorded["tokens"][at], recorded["chances"][at]
        assert_same(head.drafted(*parts, token=0), expected)
    seed, *picked = recorded["picked"].tolist()
    drafts, _ = head.drafted(head.text(12, seed).rows(), token=0, sampler=sampler())
    assert drafts == picked


@pytest.mark.parametrize(
    "form", ["two layers", "a window shorter than a block", "dflash 2", "eagle3", "qwen3_5"]
)
def test_rows_may_arrive_in_chunks_and_after_truncations(form: str, head_of: Make):
    head = head_of(form)
    text, wrong = head.text(100), head.text(30, 9)
    expected = head.drafted(text.rows(), token=7)
    cut = [text.rows(at, min(at + 23, 100)) for at in range(0, 100, 23)]
    assert_same(head.drafted(*cut, token=7), expected)
    cache = head.network.new_cache()
    for part in cut[:2]:  # a draft keeps its rows, and none of its own
        head.drafted(part, token=3, cache=cache)
    head.drafted(wrong.rows(0, 30, 46), token=3, cache=cache)
    cache.truncate(46)
    # The last row of a chain's cache depends on the token after it.
    assert len(cache) == (46 if head.kind == "dflash" else 45)
    rest = text.rows(len(cache))
    assert_same(head.drafted(rest, token=7, cache=cache), expected)


def test_a_sliding_window_masks_earlier_rows(tmp_path: Path):
    head = Head.block(tmp_path, {"windows": (20, 20)})
    text = head.text(60)
    expected = head.drafted(text.rows(), token=3)
    # The first row of a block at 60 attends to rows 41 and later.
    text.hidden[:41] += 1
    assert head.drafted(text.rows(), token=3) == expected
    text.hidden[41] += 1
    assert head.drafted(text.rows(), token=3) != expected


@pytest.mark.parametrize("window", [1, 64])
def test_the_window_option_limits_the_context(head_of: Make, window: int):
    head = head_of("two layers")
    text, small = head.text(280), Head(head.kind, head.folder, head.config)
    small.network = head.opened(window=window)
    expected = head.drafted(text.rows(280 - window), token=3)
    assert_same(small.drafted(text.rows(0, 200), text.rows(200), token=3), expected)


def test_a_chain_ends_at_an_unlikely_token(head_of: Make):
    for form in ("eagle3", "qwen3_5"):
        head = head_of(form)
        rows, network = head.text(9).rows(), head.network
        tokens, chances = head.drafted(rows, token=0)
        least = float(np.prod(chances[:3])) * 1.01
        drafted = network.draft(network.new_cache(), rows, 6, least, sampler=GREEDY)
        assert drafted == (tokens[:3], chances[:3])


@pytest.mark.parametrize(("bits", "width"), [(8, 192), (4, 96), (8, 72)])
def test_quantized_heads_match_dequantized_ones(tmp_path: Path, bits: int, width: int):
    import mlx.core as mx

    def dequantized(weight: np.ndarray) -> np.ndarray:
        size = next((size for size in (64, 32) if weight.shape[-1] % size == 0), None)
        if weight.ndim == 1 or size is None:
            return weight
        parts = mx.quantize(mx.array(weight), group_size=size, bits=bits)
        return np.array(mx.dequantize(*parts, group_size=size, bits=bits))

    changes = {"intermediate_size": width}
    weights = random_weights(tiny_config(**changes))
    rounded = {name: dequantized(weight) for name, weight in weights.items()}
    whole = Head.block(tmp_path / "whole", changes)
    small = Head(whole.kind, whole.folder, whole.config)
    small.network = whole.opened(bits=bits)
    few = Head.block(tmp_path / "few", changes, tensors=rounded)
    rows = whole.text(100).rows()
    drafted = small.drafted(rows, token=5)
    assert_same(drafted, few.drafted(rows, token=5))
    assert not np.allclose(whole.drafted(rows, token=5)[1], drafted[1])


@pytest.mark.parametrize(("kind", "target"), [("BF16", "float32"), ("F16", "bfloat16")])
def test_half_precision_weights_stay_half_precision(
    tmp_path: Path, head_of: Make, kind: str, target: str
):
    import mlx.core as mx

    head, whole = Head.block(tmp_path, kind=kind), head_of("two layers")
    head.network = head.opened(target)
    rows = head.text(100).rows()
    cache = head.network.new_cache()
    half = rows._replace(tapped=rows.tapped.astype(head.network.dtype))
    chances = head.drafted(half, token=5)[1]
    assert np.abs(np.subtract(chances, whole.drafted(rows, token=5)[1])).max() < 0.1
    head.network.prefill(cache, half)
    expected = mx.bfloat16 if kind == "BF16" else mx.float16
    assert {layer.keys.dtype for layer in cache.layers} == {expected}


@pytest.mark.parametrize(("family", "bits"), [("phi3", None), ("llama", 4), ("lfm2", None)])
def test_a_reduced_vocabulary_head_matches_the_full_logits(
    family: str, bits: int | None, tmp_path: Path
):
    import mlx.core as mx

    from paceline_mlx.model import LoadedModel, load

    folder = mlx.checkpoint(tmp_path / "made", family, num_hidden_layers=2)
    if bits is not None:
        folder = mlx.quantized(folder, tmp_path / "small", bits=bits)
    model = LoadedModel(load(folder))
    hidden = mx.random.normal((5, 64))
    tokens = mx.array([3, 77, 159])
    logits = model.head_of(tokens)(hidden)
    assert mx.allclose(logits, model.head(hidden)[:, tokens], rtol=1e-5, atol=1e-5)
    assert model.head(hidden).shape == (5, mlx.VOCAB)  # the head itself is unchanged


# -- drafting with it ------------------------------------------------------------------------------


def drafter_of(head: Head, cache: Any = None) -> Any:
    cache = head.network.new_cache() if cache is None else cache
    if head.kind == "dflash":
        return DFlashDrafter(head.network, cache, Sampling(), 0)
    return MtpDrafter(head.network, cache, Sampling(), 0)


def assert_drafts(drafter: Any, head: Head, *parts: Any, text: Text, shift: int = 0) -> None:
    proposal = drafter.propose([1] * shift + [*text.tokens], 7)
    assert (proposal.source, proposal.match) == (head.kind, 0)
    expected = head.drafted(*parts, token=text.tokens[-1])
    assert_same((proposal.tokens, proposal.probabilities), expected)


def test_the_draft_is_empty_before_hidden_states_are_observed(head: Head):
    drafter, text = drafter_of(head), head.text(3)
    assert not drafter.propose(text.tokens[:2], 7).tokens
    drafter.observe(ComputedBlock(text.tokens[:3], 0, 3))
    assert not drafter.propose(text.tokens[:3], 7).tokens, "an engine without taps"
    drafter.observe(text.seen(0, 0, wrong=3))
    assert not drafter.propose(text.tokens, 7).tokens, "nothing was kept"


def test_only_accepted_rows_become_context_and_taps_may_be_reused(head: Head):
    drafter, text = drafter_of(head), head.text(20)
    shown = text.seen(0, 12)
    drafter.observe(shown)
    for array in shown.taps.values():
        array[:] = np.nan
    drafter.propose(text.tokens[:13], 7)
    drafter.observe(text.seen(12, 15, wrong=5))
    drafter.observe(text.seen(15, 20, wrong=2))
    assert_drafts(drafter, head, text.rows(), text=text)


def test_a_long_prompt_is_prefilled_in_chunks(head: Head):
    cache, text = head.network.new_cache(), head.text(1000)
    drafter = drafter_of(head, cache)
    for start in range(0, 1000, 250):
        drafter.observe(text.seen(start, start + 250))
        assert cache.pending_count <= 750
    assert len(cache) == 750
    assert_drafts(drafter, head, text.rows(), text=text)


def test_a_prompt_may_begin_in_the_prefix_cache(head: Head):
    drafter, text = drafter_of(head), head.text(12)
    drafter.observe(text.seen(0, 12, shift=40))
    assert_drafts(drafter, head, text.rows(shift=40), text=text, shift=40)


def test_observed_blocks_may_have_gaps(head: Head):
    drafter, text = drafter_of(head), head.text(20)
    drafter.observe(text.seen(0, 12))
    drafter.observe(text.seen(12, 20, shift=48))
    # The token after the last row before the gap is not known: a chain leaves that row out.
    before = text.rows(0, 12 if head.kind == "dflash" else 11)
    assert_drafts(drafter, head, before, text.rows(12, shift=48), text=text, shift=48)


@pytest.mark.parametrize(("cut", "asked"), [(20, True), (17, False), (30, True), (0, True)])
def test_the_next_turn_keeps_the_context_before_the_truncation(head: Head, cut: int, asked: bool):
    resources, memory = shared(), DraftKV()
    text, others = head.text(30, 1), head.text(25, 2)
    (first,) = create(head.spec, resources, RequestContext(memory))
    first.observe(text.seen(0, 20))
    if asked:
        first.propose(text.tokens[:21], 7)
    first.observe(text.seen(20, 30))
    memory = memory.copy_prefix(cut) if cut % 2 else memory
    memory.truncate(cut)
    (second,) = create(head.spec, resources, RequestContext(memory))
    second.observe(others.seen(0, 10, shift=cut))
    second.observe(others.seen(10, 25, shift=cut))
    hidden = np.concatenate([text.hidden[:cut], others.hidden])
    whole = Text(hidden, [*text.tokens[:cut], *others.tokens])
    parts = [whole.rows()]
    if head.kind == "mtp" and cut == 20:
        # The row before the cut had read its token, which is another now.
        parts = [whole.rows(0, cut - 1), whole.rows(cut)]
    proposal = second.propose(whole.tokens, DRAFTS)
    tokens, chances = head.drafted(*parts, token=whole.tokens[-1])
    assert_same((proposal.tokens, proposal.probabilities), (tokens[:DRAFTS], chances[:DRAFTS]))
    assert len(resources.heads) == 1


@pytest.mark.parametrize("form", ["two layers", "dspark, vanilla", "eagle3"])
def test_the_head_cost_is_measured_from_its_drafts(
    form: str, head_of: Make, monkeypatch: pytest.MonkeyPatch
):
    head, times = head_of(form), iter([0.0, 9.0, 10.0, 10.5, 20.0, 21.0])
    monkeypatch.setattr(head.network, "cost", DraftCost())
    monkeypatch.setattr("paceline.drafters.heads.perf_counter", lambda: next(times))
    drafter, text = drafter_of(head), head.text(30)
    drafter.observe(text.seen(0, 20))
    for at, seconds in ((20, 0.001), (21, 0.001), (22, 0.5), (23, 0.6)):  # the first one compiles
        assert drafter.cost(7) == pytest.approx(seconds)
        if at < 23:
            list(drafter.propose(text.tokens[: at + 1], 7).probabilities)
            drafter.observe(text.seen(at, at + 1))
