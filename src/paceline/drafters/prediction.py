"""Drafts from what the caller expects the answer to be: a file that is to be changed a little.

What OpenAI calls predicted outputs. Follows the prediction from its beginning; where the answer
leaves it, looks for the place where the two meet again.
"""

from collections.abc import Sequence

from paceline.decoding.types import Drafter, Proposal

_RULE = (8, 4, 2)
"""Tokens that must agree where answer and prediction meet again: the most is tried first."""


_BELIEVED = 16
"""How many tokens in a row a prediction counts for before the answer has begun."""


class PredictionDrafter(Drafter):
    """Proposes what follows in the prediction."""

    name = "prediction"

    def __init__(self, prediction: Sequence[int], prompt_length: int) -> None:
        """Expect `prediction` behind a prompt of so many tokens."""
        self._prediction = list(prediction)
        self._seen = prompt_length
        self._at = 0  # where in the prediction the answer is
        self._followed = _BELIEVED  # tokens in a row that agreed

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """The next tokens of the prediction, or nothing where the answer has left it."""
        for at in range(self._seen, len(context)):
            self._follow(context, at)
        self._seen = len(context)
        if self._at < 0:
            return Proposal((), self.name)
        return Proposal(self._prediction[self._at : self._at + limit], self.name, self._followed)

    def _follow(self, context: Sequence[int], at: int) -> None:
        """Take note of the token at a place of the context."""
        if 0 <= self._at < len(self._prediction) and self._prediction[self._at] == context[at]:
            self._at += 1
            self._followed += 1
            return
        self._at, self._followed = self._meeting(context, at)

    def _meeting(self, context: Sequence[int], at: int) -> tuple[int, int]:
        """Where the prediction goes on after the last tokens up to `at`, and how many agree."""
        for count in _RULE:
            last = list(context[max(at + 1 - count, 0) : at + 1])
            for place in range(count, len(self._prediction) + 1):
                if self._prediction[place - count : place] == last:
                    return place, count
        return -1, 0
