"""The result of a step, and counters over steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.decoding.text import TextPiece
from paceline.decoding.types import NO_PROPOSAL, Proposal

FORCED = "forced"
"""Source of a proposal whose tokens are the only ones that a constraint allows: not a draft."""


class Step(NamedTuple):
    """Result of one engine call for a request."""

    kept: int
    """Rows of the block that are now part of the sequence: its length grows by this."""
    tokens: Sequence[int]
    """New tokens of the answer; empty inside the prompt."""
    pieces: Sequence[TextPiece] = ()
    """The text that each token completes. A step that only ends the answer has no token, and one
    piece with the text that was held back."""
    proposal: Proposal = NO_PROPOSAL
    """The tokens after the last token in the block."""
    matched: int = 0
    """Leading tokens of the proposal that the target picked too."""
    reasoning_tokens: int = 0
    """Tokens of reasoning in the whole answer so far."""

    @property
    def text(self) -> str:
        """New final text of the answer."""
        return "".join(piece.final for piece in self.pieces)

    @property
    def reasoning(self) -> str:
        """New text of the model's reasoning, if its marks are known."""
        return "".join(piece.reasoning for piece in self.pieces)

    @property
    def source(self) -> str:
        """Source of the proposal: a drafter's name, `none`, or `FORCED`."""
        return self.proposal.source

    @property
    def drafted(self) -> int:
        """Draft tokens in the block."""
        return 0 if self.source == FORCED else len(self.proposal.tokens)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens."""
        return 0 if self.source == FORCED else self.matched

    @property
    def forced(self) -> int:
        """New tokens that a constraint forced."""
        return self.matched if self.source == FORCED else 0


@dataclass(slots=True)
class Counters:
    """Steps and tokens of decode; prefill is not counted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    drafted_at: list[int] = field(default_factory=list)
    """Drafted tokens by position in the draft, from 0."""
    accepted_at: list[int] = field(default_factory=list)
    """Accepted tokens by position in the draft."""

    def count(self, step: Step) -> None:
        """Add one decode step."""
        self.steps += 1
        self.forced += step.forced
        if drafted := step.drafted:
            accepted, source = step.accepted, step.source
            _count_positions(self.drafted_at, drafted)
            _count_positions(self.accepted_at, accepted)
            self.drafted += drafted
            self.accepted += accepted
            self.drafted_by[source] = self.drafted_by.get(source, 0) + drafted
            self.accepted_by[source] = self.accepted_by.get(source, 0) + accepted


def _count_positions(counts: list[int], length: int) -> None:
    """Add 1 to the first `length` counts."""
    counts += [0] * (length - len(counts))
    for position in range(length):
        counts[position] += 1
