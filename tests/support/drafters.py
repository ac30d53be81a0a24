"""The drafters that must pass the conformance tests, and one that knows what is coming."""

from collections.abc import Sequence
from pathlib import Path

from paceline.decoding.types import ComputedBlock, Drafter, Policy, Proposal
from paceline.tools.train.answers import Answer
from paceline.tools.train.table import count_table, write_table

MATCHERS = [
    "ngram",
    "ngram:min=2,max=5,length=4",
    "suffix",
    "suffix:earlier",
    "recycle",
    "suffix+recycle",
    "ngram+suffix+recycle",
]
"""Drafters that know nothing but the text before them."""

SPECS = [*MATCHERS, "table", "suffix+table"]
"""Those, and the ones that were taught; a `shared` has what they need."""


def write_toy_table(folder: Path, texts: Sequence[Sequence[int]], vocab_size: int) -> Path:
    """A table of what follows what in some texts."""
    counted = count_table([Answer(i, text[:1], text[1:]) for i, text in enumerate(texts)])
    write_table(counted, folder, target="toy", vocab_size=vocab_size, facts={})
    return folder


class Says(Drafter):
    """Proposes one thing whatever the context, cut to the limit; counts how often it is asked."""

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


def drafted(policy: Policy, *proposals: Proposal, room: int = 99) -> Proposal:
    """What a policy takes of these proposals, offered in this order."""
    return policy.draft([Says(proposal) for proposal in proposals], [], room)


class Oracle(Drafter):
    """Proposes what follows in `text`; a token at a position in `wrong_at` is off by one."""

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
