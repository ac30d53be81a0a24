"""A smaller model as the drafter; here the toy model drafts for itself."""

import numpy as np
import pytest

from paceline.decoding.costs import CostTable
from paceline.decoding.generation import Stopping
from paceline.decoding.policy import Fixed
from paceline.drafters import DraftModel, ModelDrafter
from support.driver import generation, run
from support.toy import ToyEngine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine()


def drafter(engine: ToyEngine, worth: float = 0.0) -> ModelDrafter:
    return ModelDrafter(
        DraftModel(engine, CostTable({1: 0.01}, 0, {1: 1e-6}), min_probability=worth)
    )


def greedy(engine: ToyEngine, count: int) -> list[int]:
    plain = generation(engine, PROMPT, stopping=Stopping(max_tokens=count))
    return run(engine, [plain])[0].tokens


def test_it_drafts_what_the_model_would_say(engine: ToyEngine):
    proposal = drafter(engine).propose(PROMPT, 5)
    assert proposal.tokens == greedy(engine, 5)
    assert len(proposal.probabilities) == 5
    assert all(0 < probability < 1 for probability in proposal.probabilities)


@pytest.mark.parametrize("kept", range(6))
def test_its_cache_is_in_step_with_what_was_kept(engine: ToyEngine, kept: int):
    truth = greedy(engine, 12)
    one = drafter(engine)
    one.propose(PROMPT, 5)
    # So many drafts stood; then the target picked something else, and went on.
    context = [*PROMPT, *truth[:kept], 63, 7]
    fresh = drafter(engine).propose(context, 4)
    assert one.propose(context, 4) == fresh


def test_only_what_is_new_is_run(engine: ToyEngine):
    one = drafter(engine)
    drafts = list(one.propose(PROMPT, 4).tokens)
    before = engine.steps
    one.propose([*PROMPT, *drafts], 1)
    assert engine.steps == before + 1


def test_it_stops_where_its_guess_is_not_worth_a_call(engine: ToyEngine):
    whole = drafter(engine).propose(PROMPT, 8)
    stands = np.cumprod(whole.probabilities)
    worth = float(stands[2] + stands[1]) / 2  # the third token falls below it
    short = drafter(engine, worth).propose(PROMPT, 8)
    assert short.tokens == whole.tokens[:3]


def test_what_it_takes_goes_by_how_long_its_drafts_are(engine: ToyEngine):
    one = drafter(engine)
    assert one.cost(8) == pytest.approx(0.01)
    for _ in range(40):
        one.propose(PROMPT, 8)
    assert one.cost(8) == pytest.approx(0.08, rel=0.01)
    assert one.cost(2) == pytest.approx(0.02, rel=0.01)


def test_what_it_takes_goes_by_the_context(engine: ToyEngine):
    one = drafter(engine)
    one.propose(PROMPT, 1)
    assert one.cost(1) == pytest.approx(0.01 + 1e-6 * len(PROMPT))


def test_it_drafts_up_to_its_own_context_and_no_further():
    small = ToyEngine(context_length=10)
    one = drafter(small)
    assert len(one.propose(PROMPT, 8).tokens) == 2
    assert len(one.propose([*PROMPT, 1], 8).tokens) == 1
    assert not one.propose([*PROMPT, 1, 2], 8).tokens
    assert not one.propose([*PROMPT, 1, 2, 3, 4], 8).tokens


def test_nothing_is_drafted_for_nothing(engine: ToyEngine):
    assert not drafter(engine).propose([], 4).tokens


def test_its_slots_are_given_back(engine: ToyEngine):
    free = engine.free_slots
    one = drafter(engine)
    one.propose(PROMPT, 4)
    assert engine.free_slots < free
    for _ in range(2):
        one.close()
    assert engine.free_slots == free


def test_a_model_that_drafts_for_itself_is_always_right(engine: ToyEngine):
    answer = greedy(engine, 41)
    one = generation(
        engine,
        PROMPT,
        stopping=Stopping(max_tokens=41),
        drafters=[drafter(ToyEngine())],
        policy=Fixed(8),
    )
    (found,) = run(engine, [one])
    assert found.tokens == answer
    assert one.counters.accepted == one.counters.drafted
    assert one.counters.steps == 5
