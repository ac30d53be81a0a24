"""An answer's text, divided by its tokens: what a guess brought, and what the model said itself.

Knows steps and one function, ids -> text. The rule: the pieces of a step joined are its text.
"""

from collections.abc import Sequence

from paceline.decoding.generation import Step
from paceline.decoding.reasoning import Thoughts, answer_text
from paceline.decoding.text import Decode


class Pieces:
    """Divides the steps of one answer, each once and in order."""

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        thoughts: Thoughts | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """`decode`, `stops` and `thoughts` are those of the answer.

        With `whole` a piece has the text of thoughts, too, before that of the answer.
        """
        self._text = answer_text(decode, stops, thoughts)
        self._whole = whole

    def of(self, step: Step) -> list[str]:
        """For each token of a step, the text that became certain with it."""
        pieces = []
        rest = step.reasoning + step.text if self._whole else step.text
        for token in step.tokens:
            piece = self._text.push(token)
            if self._whole:
                piece = self._text.thought() + piece
            piece = piece if rest.startswith(piece) else rest
            rest = rest[len(piece) :]
            pieces.append(piece)
        if rest and pieces:  # what was held back until the end
            pieces[-1] += rest
        return pieces
