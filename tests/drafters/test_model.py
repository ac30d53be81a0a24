"""A draft model; here the toy model drafts for itself."""

import numpy as np
import pytest

from paceline.decoding.costs import CostTable
from paceline.decoding.policy import Fixed
from paceline.decoding.stopping import Stopping
from paceline.drafters import DraftModel
from paceline.drafters.model import ModelDrafter
from support.driver import generation, run
from support.toy import ToyEngine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine()


def drafter(engine: ToyEngine, min_probability: float = 0.0) -> ModelDrafter:
    return ModelDrafter(
        DraftModel(engine, CostTable({1: 0.01}, 0, {1: 1e-6}), min_probability=min_probability)
    )


def greedy(engine: ToyEngine, count: int) -> list[int]:
    plain = generation(engine, PROMPT, stopping=Stopping(max_tokens=count))
    return run(engine, [plain])[0].tokens


@pytest.mark.parametrize("kept", [0, 2, 5])
def test_rejected_kv_is_rolled_back_and_only_new_tokens_are_computed(engine: ToyEngine, kept: int):
    truth = greedy(engine, 12)
    one = drafter(engine)
    one.propose(PROMPT, 5)
    before = engine.steps
    one.propose([*PROMPT, *truth[:5]], 1)
    assert engine.steps == before + 1
    # `kept` draft tokens were accepted; then the target picked another one, and one more.
    context = [*PROMPT, *truth[:kept], 63, 7]
    fresh = drafter(engine).propose(context, 4)
    assert one.propose(context, 4) == fresh


def test_a_draft_ends_below_the_minimum_probability(engine: ToyEngine):
    whole = drafter(engine).propose(PROMPT, 8)
    accepted = np.cumprod(whole.probabilities)
    least = float(accepted[2] + accepted[1]) / 2  # the third token falls below it
    short = drafter(engine, least).propose(PROMPT, 8)
    assert short.tokens == whole.tokens[:3]


def test_the_draft_models_cost_follows_the_draft_length(engine: ToyEngine):
    one = drafter(engine)
    assert one.cost(8) == pytest.approx(0.01)
    for _ in range(40):
        one.propose(PROMPT, 8)
    assert one.cost(8) == pytest.approx(0.08, rel=0.01)
    assert one.cost(2) == pytest.approx(0.02, rel=0.01)


def test_drafts_end_at_the_draft_models_context_length():
    small = ToyEngine(context_length=10)
    one = drafter(small)
    assert len(one.propose(PROMPT, 8).tokens) == 2
    assert len(one.propose([*PROMPT, 1], 8).tokens) == 1
    assert not one.propose([*PROMPT, 1, 2], 8).tokens
    assert not one.propose([*PROMPT, 1, 2, 3, 4], 8).tokens


def test_close_frees_the_draft_models_slots(engine: ToyEngine):
    free = engine.free_slots
    one = drafter(engine)
    one.propose(PROMPT, 4)
    assert engine.free_slots < free
    for _ in range(2):
        one.close()
    assert engine.free_slots == free


def test_a_model_drafting_for_itself_is_always_accepted(engine: ToyEngine):
    answer = greedy(engine, 41)
    one = generation(
        engine,
        PROMPT,
        stopping=Stopping(max_tokens=41),
        drafters=[drafter(ToyEngine())],
        policy=Fixed(8),
    )
    (rows,) = run(engine, [one])
    assert rows.tokens == answer
    assert one.counters.accepted == one.counters.drafted
    assert one.counters.steps == 5
