"""Drafts from the caller's prediction of the response, e.g. a file to be edited.

OpenAI's predicted outputs. The drafter follows the prediction from its start; where the response
diverges, it searches for the position where the two agree again.
"""

from collections.abc import Sequence

from paceline.decoding.types import Drafter, Proposal, common_prefix_length

_INITIAL_MATCH = 16
"""Match length of the prediction before the response has begun."""

_MAX_COMPARED = 8
"""Maximum tokens compared to choose between positions to continue from."""

_MAX_POSITIONS = 64
"""Positions indexed per token pair: a prediction that repeats one token has too many."""


class PredictionDrafter(Drafter):
    name = "prediction"

    def __init__(self, prediction: Sequence[int], prompt_length: int) -> None:
        """Expect `prediction` after a prompt of `prompt_length` tokens."""
        self._prediction = list(prediction)
        self._seen = prompt_length
        self._at = 0  # position of the answer in the prediction; -1: diverged
        self._match = _INITIAL_MATCH  # consecutive tokens that agree
        self._positions: dict[tuple[int, int], list[int]] = {}
        """Two tokens -> positions in the prediction right after them."""
        for at in range(2, len(self._prediction) + 1):
            pair = self._prediction[at - 2], self._prediction[at - 1]
            positions = self._positions.setdefault(pair, [])
            if len(positions) < _MAX_POSITIONS:
                positions.append(at)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """Propose the next tokens of the prediction; none if the response has diverged from it."""
        for at in range(self._seen, len(context)):
            self._follow(context, at)
        self._seen = len(context)
        if self._at < 0:
            return Proposal((), self.name)
        return Proposal(self._prediction[self._at : self._at + limit], self.name, self._match)

    def _follow(self, context: Sequence[int], at: int) -> None:
        if 0 <= self._at < len(self._prediction) and self._prediction[self._at] == context[at]:
            self._at += 1
            self._match += 1
            return
        positions = self._positions.get((context[at - 1], context[at]), []) if at else []
        self._at, self._match = -1, 0
        latest = context[max(at + 1 - _MAX_COMPARED, 0) : at + 1][::-1]
        for position in positions:
            expected = self._prediction[max(position - _MAX_COMPARED, 0) : position][::-1]
            match = common_prefix_length(latest, expected)
            if match > self._match:
                self._at, self._match = position, match
