import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.generation import Stopping
from paceline.decoding.policy import Fixed
from paceline.decoding.types import ComputedBlock, Drafter, Proposal
from paceline.drafters import NgramDrafter, create
from paceline.drafters.probe import Probe
from support.driver import generation, run
from support.toy import ToyEngine


class Saying(Drafter):
    """Proposes what it is told to, one list after the other, and nothing from then on."""

    name = "saying"

    def __init__(self, *guesses: list[int]) -> None:
        self.guesses = list(guesses)
        self.limits: list[int] = []
        self.observed: list[ComputedBlock] = []

    def propose(self, context: list[int], limit: int) -> Proposal:
        self.limits.append(limit)
        return Proposal(self.guesses.pop(0) if self.guesses else (), self.name, 3)

    def observe(self, computed: ComputedBlock) -> None:
        self.observed.append(computed)


def counts(probe: Probe) -> tuple[int, int, int]:
    return probe.steps, probe.drafted, probe.accepted


def test_it_proposes_nothing_and_asks_for_its_own_length():
    saying = Saying([5, 6])
    probe = Probe(saying, length=4)
    assert (probe.name, probe.watched) == ("probe(saying)", "saying")
    assert not probe.propose([1], 15).tokens
    assert saying.limits == [4]


def test_a_guess_is_judged_when_the_text_shows_where_it_falls():
    probe = Probe(Saying([5, 6, 7]), length=3)
    probe.propose([1], 1)
    probe.propose([1, 5], 1)
    assert counts(probe) == (0, 0, 0)
    probe.propose([1, 5, 9], 1)
    assert counts(probe) == (1, 3, 1)


def test_a_guess_that_stands_whole_is_judged_with_the_token_after_it():
    probe = Probe(Saying([5, 6]), length=2)
    probe.propose([1], 1)
    probe.propose([1, 5, 6], 1)
    assert counts(probe) == (0, 0, 0)
    probe.propose([1, 5, 6, 7], 1)
    assert counts(probe) == (1, 2, 2)


def test_an_open_guess_is_counted_when_the_text_ends():
    probe = Probe(Saying([5, 6]), length=2)
    probe.propose([1], 1)
    told = {"steps": 1, "drafted": 2, "accepted": 1}
    assert probe.count([1, 5]) == told
    assert probe.count([1, 5]) == told


def test_a_drafter_that_abstains_makes_a_step_of_every_token():
    probe = Probe(Saying(), length=4)
    for end in range(1, 6):
        probe.propose(list(range(end)), 1)
    assert counts(probe) == (4, 0, 0)


def test_what_the_engine_brought_is_passed_on():
    saying = Saying()
    computed = ComputedBlock([1], 0, 1, None)
    Probe(saying, length=4).observe(computed)
    assert saying.observed == [computed]


@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=60), length=st.integers(1, 6))
def test_it_counts_what_speculation_would_have_done(text: list[int], length: int):
    probe = Probe(NgramDrafter(), length)
    for end in range(1, len(text)):
        probe.propose(text[:end], 1)
    probe.settle(text, ended=True)

    drafter = NgramDrafter()
    steps = drafted = accepted = 0
    at = 1
    while at < len(text):
        guess = drafter.propose(text[:at], length).tokens
        stood = 0
        while stood < min(len(guess), len(text) - at) and guess[stood] == text[at + stood]:
            stood += 1
        steps, drafted, accepted = steps + 1, drafted + len(guess), accepted + stood
        at += stood + 1
    assert counts(probe) == (steps, drafted, accepted)


@pytest.mark.parametrize("spec", ["ngram", "suffix"])
def test_beside_plain_decoding_it_counts_the_steps_that_the_drafter_would_take(spec: str):
    engine, prompt, stopping = ToyEngine(), [1, 2, 3, 4, 1, 2], Stopping(max_tokens=64)
    drafting = generation(engine, prompt, stopping=stopping, drafters=create(spec), policy=Fixed(8))
    run(engine, [drafting])
    probe = Probe(*create(spec), length=7)
    plain = generation(engine, prompt, stopping=stopping, drafters=[probe], policy=Fixed(8))
    (answer,) = run(engine, [plain])
    probe.settle(prompt + answer.tokens, ended=True)

    assert plain.counters.drafted == 0
    assert 0 < probe.accepted < probe.drafted
    assert probe.steps == drafting.counters.steps
    # The last token is never a draft where the answer is known to end, so one may be missing.
    assert probe.accepted - drafting.counters.accepted in (0, 1)
