"""An answer's text, divided by its tokens: what a guess brought, and what the model said itself.

Knows steps and one function, ids -> text. The rule: the pieces of a step joined are its text.
"""

from collections.abc import Sequence

from paceline.decoding.generation import Step
from paceline.decoding.text import Decode, TextStream


class Pieces:
    """Divides the steps of one answer, each once and in order."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        """`decode` and `stops` are those of the answer."""
        self._text = TextStream(decode, stops)

    def of(self, step: Step) -> list[str]:
        """For each token of a step, the text that became certain with it."""
        pieces = []
        rest = step.text
        for token in step.tokens:
            piece = self._text.push(token)
            piece = piece if rest.startswith(piece) else rest
            rest = rest[len(piece) :]
            pieces.append(piece)
        if rest:  # what was held back until the end
            pieces[-1] += rest
        return pieces
