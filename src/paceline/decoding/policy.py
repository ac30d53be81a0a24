"""Baseline policies: fixed, adaptive and Kelly-optimal draft lengths.

Other runtimes use these rules; `auto.py` has the default. They remain so that the comparison can
be repeated. Invariant: a policy changes speed, never a token.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from paceline.decoding.types import NO_PROPOSAL, DecodeOutcome, Drafter, Proposal


class Fixed:
    """A constant block size; drafters run in order until one proposes tokens."""

    name = "fixed"

    def __init__(self, max_block: int) -> None:
        """Use blocks of `max_block` rows: the last token and max_block - 1 draft tokens."""
        self._max_block = max_block

    def draft_length(self) -> int:
        return self._max_block - 1

    def draft(self, drafters: Sequence[Drafter], context: Sequence[int], limit: int) -> Proposal:
        limit = min(self.draft_length(), limit)
        if limit > 0:
            for drafter in drafters:
                proposal = drafter.propose(context, limit)
                if proposal.tokens:
                    return proposal
        return NO_PROPOSAL

    def observe(self, outcome: DecodeOutcome) -> None:
        """Do nothing: the block size is constant."""


class Adaptive(Fixed):
    """Short blocks after low acceptance (mirror-sd's adaptive rule, `mirror_sd/generate.py`).

    If the last 3 steps with a draft accepted under 1 token on average, the block is 2; under 2, it
    is 3; otherwise it is the full block.
    """

    name = "adaptive"

    def __init__(self, max_block: int) -> None:
        super().__init__(max_block)
        self._accepted: deque[int] = deque(maxlen=3)

    def draft_length(self) -> int:
        if not self._accepted:
            return self._max_block - 1
        mean = sum(self._accepted) / len(self._accepted)
        block = 2 if mean < 1 else 3 if mean < 2 else self._max_block
        return min(block, self._max_block) - 1

    def observe(self, outcome: DecodeOutcome) -> None:
        if outcome.proposal.tokens:
            self._accepted.append(outcome.accepted)


class Kelly(Fixed):
    """Kelly-optimal drafting (KOD) as in mirror-sd's public code.

    Uses the block g in 2..max_block that maximizes (ea + 1) / (a + b g), with
    ea = alpha (1 - alpha^(g-1)) / (1 - alpha), where alpha is the mean acceptance of the last 8
    steps, and a and b are a least-squares fit to the last 16 (block, seconds) pairs.
    """

    name = "kelly"
    _START = (0.0470, 0.0087)
    """a and b in seconds, from mirror-sd, until two block sizes were timed."""

    def __init__(self, max_block: int) -> None:
        super().__init__(max_block)
        self._rates: deque[float] = deque(maxlen=8)
        self._times: deque[tuple[int, float]] = deque(maxlen=16)

    def draft_length(self) -> int:
        alpha = sum(self._rates) / len(self._rates) if self._rates else 0.5
        a, b = self._line()
        tokens = [*accumulate(alpha**place for place in range(self._max_block))]  # ea + 1, by g - 1
        blocks = range(min(2, self._max_block), self._max_block + 1)
        return max(blocks, key=lambda g: tokens[g - 1] / max(a + b * g, 1e-9)) - 1

    def observe(self, outcome: DecodeOutcome) -> None:
        drafted = len(outcome.proposal.tokens)
        if drafted:
            self._rates.append(outcome.accepted / drafted)
        if outcome.seconds > 0:
            self._times.append((drafted + 1, outcome.seconds))

    def _line(self) -> tuple[float, float]:
        blocks = [block for block, _ in self._times]
        if len(set(blocks)) < 2:
            return self._START
        slope, offset = np.polyfit(blocks, [seconds for _, seconds in self._times], 1)
        return float(offset), float(slope)
