"""The drafters that must pass the conformance tests, and scripted ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.decoding.types import ComputedBlock, Drafter, Policy, Proposal
from paceline.drafters.table_counts import count_table
from paceline_lab.learn.table import write_table

MATCHERS = ["ngram", "ngram:min=2,max=5,length=4", "suffix", "suffix:earlier", "suffix+ngram:min=1"]

SPECS = [*MATCHERS, "table", "suffix+table", "kept", "suffix+table+kept"]
"""Those, and the trained ones; `shared` has their resources."""


class Text(NamedTuple):
    prompt: Sequence[int]
    answer: Sequence[int]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]


def write_toy_table(folder: Path, texts: Sequence[Sequence[int]], vocab_size: int) -> Path:
    counted = count_table([Text(text[:1], text[1:]) for text in texts])
    write_table(counted, folder, target="toy", vocab_size=vocab_size, facts={})
    return folder


class FixedDrafter(Drafter):
    """A drafter that always makes the same proposal."""

    def __init__(self, proposal: Proposal, seconds: float = 0.0) -> None:
        self.name = proposal.source
        self.asked: list[int] = []
        self._proposal = proposal
        self._seconds = seconds

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        self.asked.append(limit)
        return self._proposal.cut(limit)

    def cost(self, limit: int) -> float:
        return self._seconds


def drafted(policy: Policy, *proposals: Proposal, limit: int = 99) -> Proposal:
    return policy.draft([FixedDrafter(proposal) for proposal in proposals], [], limit)


class Oracle(Drafter):
    """A drafter that continues `text`; tokens at positions in `wrong_at` are off by one."""

    name = "oracle"

    def __init__(self, text: Sequence[int], wrong_at: Sequence[int] = (), match: int = 24) -> None:
        self.seen: list[ComputedBlock] = []
        self.asked: list[int] = []
        self._text = text
        self._wrong_at = set(wrong_at)
        self._match = match

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        self.asked.append(limit)
        ends = range(len(context), min(len(context) + limit, len(self._text)))
        tokens = [self._text[at] ^ (at in self._wrong_at) for at in ends]
        return Proposal(tokens, self.name, self._match)

    def observe(self, computed: ComputedBlock) -> None:
        self.seen.append(computed)
