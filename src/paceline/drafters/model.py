"""A smaller model with the same vocabulary as the drafter: one token after the other.

Its cache is kept in step with the text: what the target refused is forgotten, what it kept is there
already. It stops where its own guess is no longer likely enough to be worth another of its calls.

A long text is read a chunk a step, and where the cache has no room the drafter abstains: neither
holds up the target, or the requests that share its calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paceline.decoding.costs import CostTable
from paceline.decoding.types import Block, Drafter, Logits, Proposal
from paceline.errors import CacheFull

_MEMORY = 0.25
"""Weight of the newest draft's length in what the next is expected to take."""

_CHUNK = 512
_FEW = 8
"""Tokens that are run as those of an answer are: faster, when they are not many."""


class DraftSequence(Protocol):
    """One sequence in the small model's engine."""

    def commit(self, rows: int) -> None:
        """Keep the first rows of the last block."""
        ...

    def rewind(self, length: int) -> None:
        """Forget all slots from `length` on."""
        ...

    @property
    def length(self) -> int:
        """Slots that belong to the sequence."""
        ...

    def close(self) -> None:
        """Give the slots back."""
        ...


class DraftEngine(Protocol):
    """What is needed of an engine."""

    @property
    def context_length(self) -> int:
        """The most slots one sequence can have."""
        ...

    def open(self) -> Any:
        """A new, empty sequence: `DraftSequence`."""
        ...

    def step(self, work: Sequence[tuple[Any, Block]]) -> Any:
        """Run blocks; the result has `logits`, one array for each."""
        ...


@dataclass(frozen=True, slots=True)
class DraftModel:
    """An opened model to draft with; one serves all requests."""

    engine: DraftEngine
    cost: CostTable
    """Seconds of its calls, measured."""
    min_probability: float
    """A token is drafted while the draft stands with at least this probability: the price of a call
    against one of the target's."""
    slots: int = 0
    """Slots of its cache, for the sequences of all requests together."""


class ModelDrafter(Drafter):
    """Drafts with a smaller model, for one request."""

    name = "model"

    def __init__(self, small: DraftModel) -> None:
        """Draft with `small`; `close` gives its slots back."""
        self._small = small
        self._slots: DraftSequence = small.engine.open()
        self._held: list[int] = []  # tokens whose keys and values are in the slots
        self._length = 1.0  # tokens of a draft, lately
        self._reading = False  # whether its cache has yet to reach the end of the text

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """The small model's own greedy way on, each token with its probability."""
        # A token that is drafted is run to get the next, but for the last.
        limit = min(limit, self._small.engine.context_length - len(context))
        if not context or limit < 1:
            return Proposal((), self.name)
        tokens: list[int] = []
        probabilities: list[float] = []
        stands = 1.0
        try:
            logits = self._catch_up(context)
            while logits is not None:
                token, probability = _best(logits)
                stands *= probability
                tokens.append(token)
                probabilities.append(probability)
                if len(tokens) == limit or stands < self._small.min_probability:
                    break
                logits = self._run([token])
        except CacheFull:
            # Slots that others need more: whoever holds few of them drafts nothing with them.
            self._slots.rewind(0)
            self._held = []
        if not tokens:
            return Proposal((), self.name)
        self._length += _MEMORY * (len(tokens) - self._length)
        return Proposal(tokens, self.name, 0, probabilities)

    def cost(self, limit: int) -> float:
        """A call for each token of a draft that is as long as the last ones were.

        Nothing while a long text is still being read: that has to be done whenever it is asked.
        """
        if self._reading:
            return 0.0
        return self._small.cost.at_context(len(self._held))(1) * min(limit, self._length)

    def close(self) -> None:
        """Give the slots back."""
        self._slots.close()

    def _catch_up(self, context: Sequence[int]) -> Logits | None:
        """Bring the slots to the end of `context`, by a chunk at most; the row after that end.

        None where the end was not reached: the next step goes on from there.
        """
        same = 0
        most = min(len(self._held), len(context) - 1)
        while same < most and self._held[same] == context[same]:
            same += 1
        self._slots.rewind(same)
        same = self._slots.length
        del self._held[same:]
        row = self._run(context[same : same + _CHUNK])
        self._reading = len(self._held) < len(context)
        return None if self._reading else row

    def _run(self, tokens: Sequence[int]) -> Logits:
        block = Block(tokens, 1, prefill=len(tokens) > _FEW)
        result = self._small.engine.step([(self._slots, block)])
        self._slots.commit(len(tokens))
        self._held += tokens
        row: Logits = result.logits[0][0]
        return row


def _best(logits: Logits) -> tuple[int, float]:
    token = int(logits.argmax())
    return token, float(1 / np.exp(logits - logits[token]).sum())
