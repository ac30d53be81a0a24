import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.policy import Fixed
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import ComputedBlock, Drafter, Proposal
from paceline.drafters import create
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.probe import Probe
from support.driver import generation, run
from support.toy import ToyEngine


class Scripted(Drafter):
    name = "scripted"

    def __init__(self, *drafts: list[int]) -> None:
        self.drafts = list(drafts)
        self.limits: list[int] = []
        self.observed: list[ComputedBlock] = []

    def propose(self, context: list[int], limit: int) -> Proposal:
        self.limits.append(limit)
        return Proposal(self.drafts.pop(0) if self.drafts else (), self.name, 3)

    def observe(self, computed: ComputedBlock) -> None:
        self.observed.append(computed)


def counts(probe: Probe) -> tuple[int, int, int]:
    return probe.steps, probe.drafted, probe.accepted


def test_an_unfinished_draft_is_counted_at_the_end_of_the_text():
    probe = Probe(Scripted([5, 6]), length=2)
    probe.propose([1], 1)
    counted = {"steps": 1, "drafted": 2, "accepted": 1}
    assert probe.count([1, 5]) == counted
    assert probe.count([1, 5]) == counted


@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=60), length=st.integers(1, 6))
def test_probe_counts_match_speculative_decoding(text: list[int], length: int):
    probe = Probe(NgramDrafter(), length)
    for end in range(1, len(text)):
        probe.propose(text[:end], 1)
    probe.count_open(text, ended=True)

    drafter = NgramDrafter()
    steps = drafted = accepted = 0
    at = 1
    while at < len(text):
        draft = drafter.propose(text[:at], length).tokens
        kept = 0
        while kept < min(len(draft), len(text) - at) and draft[kept] == text[at + kept]:
            kept += 1
        steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + kept
        at += kept + 1
    assert counts(probe) == (steps, drafted, accepted)


@pytest.mark.parametrize("spec", ["ngram", "suffix"])
def test_probe_during_plain_decoding_counts_the_drafters_steps(spec: str):
    engine, prompt, stopping = ToyEngine(), [1, 2, 3, 4, 1, 2], Stopping(max_tokens=64)
    drafting = generation(engine, prompt, stopping=stopping, drafters=create(spec), policy=Fixed(8))
    run(engine, [drafting])
    probe = Probe(*create(spec), length=7)
    plain = generation(engine, prompt, stopping=stopping, drafters=[probe], policy=Fixed(8))
    (answer,) = run(engine, [plain])
    probe.count_open(prompt + answer.tokens, ended=True)

    assert plain.counters.drafted == 0
    assert 0 < probe.accepted < probe.drafted
    missing = drafting.counters.steps - probe.steps, probe.accepted - drafting.counters.accepted
    # Where the end is known, the last token is never a draft, and alone it is not asked for.
    assert missing in ((0, 0), (0, 1), (1, 0))
