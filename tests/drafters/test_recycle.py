import numpy as np
import pytest

from paceline.decoding.types import ComputedBlock
from paceline.drafters import RecycleDrafter


@pytest.fixture
def drafter() -> RecycleDrafter:
    return RecycleDrafter()


def rows(*favourites: int) -> np.ndarray:
    return np.eye(10, dtype=np.float32)[list(favourites)].reshape(-1, 10)


def test_recycle_proposes_the_last_successor_of_the_last_token(drafter: RecycleDrafter):
    proposal = drafter.propose([1, 2, 1, 3, 1], 4)
    assert (proposal.tokens, proposal.match) == ((3,), 1)


def test_recycle_proposes_the_argmax_after_a_rejected_token(drafter: RecycleDrafter):
    # Row 1 is that of draft token 7, which was rejected: its argmax is 8.
    drafter.observe(ComputedBlock([1, 7, 5], 0, 1, rows(4, 8, 9)))
    proposal = drafter.propose([1, 4, 7], 4)
    assert (proposal.tokens, proposal.match) == ((8,), 0)


def test_only_the_first_rejected_token_is_recycled(drafter: RecycleDrafter):
    # The 5 was run after a token that is not part of the text.
    drafter.observe(ComputedBlock([1, 7, 5], 0, 1, rows(4, 8, 9)))
    assert not drafter.propose([1, 4, 5], 4).tokens


def test_successors_in_the_text_come_before_those_in_the_logits(drafter: RecycleDrafter):
    drafter.observe(ComputedBlock([1, 7], 0, 1, rows(4, 8)))
    assert drafter.propose([7, 6, 7], 4).tokens == (6,)


@pytest.mark.parametrize(
    "computed",
    [
        ComputedBlock([1, 7], 0, 2, rows(7, 8)),
        ComputedBlock([1, 7, 5], 0, 3, rows(5)),
        ComputedBlock([1, 7, 5], 0, 3, rows()),
    ],
    ids=["all accepted", "the prompt's end", "inside the prompt"],
)
def test_recycle_learns_nothing_without_a_rejected_token(
    drafter: RecycleDrafter, computed: ComputedBlock
):
    drafter.observe(computed)
    for last in (1, 5, 7):
        assert not drafter.propose([last], 4).tokens
