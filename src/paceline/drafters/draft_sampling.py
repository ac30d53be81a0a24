"""Picks draft tokens as the target's sampler would.

A draft token is accepted if it equals the target's own pick, which at a temperature depends on the
random numbers of (seed, position, token). A drafter with a distribution picks by the same numbers:
the nearer its distribution is to the target's, the more often the picks are equal.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from paceline.decoding.sampling import Sampler, Sampling
from paceline.decoding.types import common_prefix_length

_NEAR = 16
"""Scores further below the best are ignored: 200,000 of them are less than 0.03 of it."""


class DraftSampler:
    """The sampler of one request, for a drafter.

    Penalties count the text, but not the tokens of the draft itself. No constraint is applied.
    """

    def __init__(self, sampling: Sampling, prompt_length: int, vocab_size: int) -> None:
        bias = {token: value for token, value in sampling.logit_bias.items() if token < vocab_size}
        self._sampling = replace(sampling, logit_bias=bias)
        self._prompt_length, self._vocab_size = prompt_length, vocab_size
        self._counted: list[int] = []
        self._sampler = Sampler(self._sampling, (), vocab_size)

    def follow(self, context: Sequence[int]) -> None:
        """Count `context`, the prompt and the output so far, for the penalties."""
        if not self._sampler.counts_tokens:
            return
        known = common_prefix_length(self._counted, context)
        if known < max(len(self._counted), self._prompt_length):
            known = min(self._prompt_length, len(context))
            self._sampler = Sampler(self._sampling, context[:known], self._vocab_size)
        for token in context[known:]:
            self._sampler.push(token)
        self._counted = list(context)

    @property
    def picks_argmax(self) -> bool:
        return self._sampler.picks_argmax

    def pick(
        self,
        logits: npt.NDArray[np.float32],
        position: int,
        tokens: npt.NDArray[np.int64] | None = None,
    ) -> tuple[int, float]:
        """Return a draft token and its estimated acceptance; see `Sampler.pick_draft`.

        Args:
            logits: [n] float32.
            position: of the token.
            tokens: the token of each logit, [n]; None: the vocabulary, in order.
        """
        if self.picks_argmax:
            best = int(logits.argmax())
            near = logits[logits > logits[best] - _NEAR]
            chance = float(1 / np.exp(near - logits[best]).sum())
            return best if tokens is None else int(tokens[best]), chance
        if tokens is not None:
            row = np.full(self._vocab_size, -np.inf, np.float32)
            row[tokens] = logits
            logits = row
        return self._sampler.pick_draft(logits, position)

    def pick_rows(
        self, logits: npt.NDArray[np.float32], position: int
    ) -> tuple[list[int], list[float]]:
        """Pick from rows [r, vocab] at `position` and later; return tokens and their estimates."""
        picked = [self.pick(row, position + at) for at, row in enumerate(logits)]
        return [token for token, _ in picked], [chance for _, chance in picked]
