"""EAGLE-3 and MTP layers: drafts token by token, each from a token and the state before it.

    tokens     a    b    c    d       the target has computed a b c, and picked d
    EAGLE-3      (b,a) (c,b) (d,c)    rows at the positions of the states
    MTP          (b,a) (c,b) (d,c)    rows at the positions of the tokens

The row (d, c) gives the first draft and a state; the two make the next row. Rows of drafts are
dropped: accepted tokens are computed again with the target's own states.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.decoding.types import Logits
from paceline.drafters.draft_sampling import DraftSampler
from paceline.drafters.heads import MIN_CHANCE
from paceline.drafters.native.cache import DraftCache, DraftNetwork
from paceline.drafters.native.file import DraftFile

LONGEST_CHAIN = 8
"""Maximum tokens of a chain without the option `length`."""

_PIECE = 64
"""Rows per forward pass."""


class ChainNetwork(DraftNetwork):
    name = "mtp"

    def __init__(self, file: DraftFile, model: Any, length: int) -> None:
        """Take an open drafter (`OpenDrafter`); `length` is the maximum chain length in tokens."""
        super().__init__(file, model)
        self._length = length
        self._shift = int(file.form == "MTP")
        """Offset from a state's position to that of its row."""

    def new_cache(self) -> DraftCache:
        return DraftCache(self._model.open(causal=True, hidden="outputs"), self._shift)

    def fill(self, cache: DraftCache) -> None:
        states, following = cache.take()
        count = min(len(following), len(states))
        if count:
            self._run(cache, states[:count], following[:count])
        cache.start += count
        cache.pending = [states[count:]]

    def draft(
        self, cache: DraftCache, context: Sequence[int], limit: int, sampler: DraftSampler
    ) -> tuple[list[int], list[float]]:
        if cache.pending:
            self.fill(cache)
        states, _ = cache.take()
        logits, state = self._run(cache, states, [context[-1]], outputs=1)
        end = len(context) - 1 + self._shift
        tokens: list[int] = []
        chances: list[float] = []
        likely = 1.0
        while True:
            token, chance = sampler.pick(logits[0], len(context) + len(tokens))
            tokens.append(token)
            chances.append(chance)
            likely *= chance
            if len(tokens) == min(limit, self._length) or likely < MIN_CHANCE:
                break
            at = end + len(tokens) - 1
            logits, state = cache.context.run([token], at, states=state, outputs=1)
        cache.context.truncate(end)
        return tokens, chances

    def _run(
        self, cache: DraftCache, states: Logits, tokens: Sequence[int], outputs: int = 0
    ) -> tuple[Logits, Logits]:
        """Run rows of pending states; see `DraftContext.run`.

        Only a row that is alone in its pass has an output: of several, llama.cpp returns the first.
        """
        start = cache.start + self._shift
        if not self._shift:
            states = cache.context.encode(states)
        elif cache.context.length < start:  # the state before the first token is not known
            cache.context.run([cache.first], start - 1, states=np.zeros_like(states[:1]), outputs=0)
        for at in range(0, len(tokens), _PIECE):
            part = slice(at, at + _PIECE)
            result: tuple[Logits, Logits] = cache.context.run(
                tokens[part], start + at, states=states[part], outputs=outputs
            )
        return result
