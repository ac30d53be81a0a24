"""DFlash, DFlash 2 and DSpark: a block of drafts in one pass.

Formulas: arXiv 2602.06036 (DFlash), z-lab's and DeepSpec's code for the selector and the Markov
head. llama.cpp computes them; the outputs read from the rows differ:

    DFlash      logits of the rows after the first
    DSpark      logits of all rows, given the draft before, and each draft's acceptance probability
    DFlash 2    each row's candidates, and their scores for each candidate of the row before
"""

from collections.abc import Sequence

import numpy as np

from paceline.decoding.types import Logits
from paceline.drafters.draft_sampling import DraftSampler
from paceline.drafters.native.cache import DraftCache, DraftNetwork


class BlockNetwork(DraftNetwork):
    name = "dflash"

    def new_cache(self) -> DraftCache:
        hidden = "all" if self._file.candidates else "outputs" if self._file.confident else "no"
        return DraftCache(self._model.open(causal=self._file.causal, hidden=hidden))

    def fill(self, cache: DraftCache) -> None:
        if cache.pending:
            cache.context.inject(cache.take()[0], cache.start)

    def draft(
        self, cache: DraftCache, context: Sequence[int], limit: int, sampler: DraftSampler
    ) -> tuple[list[int], list[float]]:
        self.fill(cache)
        file, position = self._file, len(context) - 1
        rows = min(limit + file.first, file.block)
        tokens = [context[-1], *[file.mask] * (rows - 1)]
        outputs = 0 if file.candidates else rows
        logits, hidden = cache.context.run(tokens, position, outputs=outputs)
        cache.context.truncate(position)
        if file.candidates:
            return self._selected(hidden[1:], position, sampler)
        tokens, chances = sampler.pick_rows(logits[file.first :], position + 1)
        return tokens, hidden[file.first :, 0].tolist() if file.confident else chances

    def _selected(
        self, lattice: Logits, position: int, sampler: DraftSampler
    ) -> tuple[list[int], list[float]]:
        """Return the path through the candidates: each is chosen given the one before it.

        A lattice row: n tokens, as numbers, then n scores for each candidate of the row before it.
        The first row's scores all follow the last token.
        """
        count = self._file.candidates
        tokens: list[int] = []
        chances: list[float] = []
        before = 0
        for at, row in enumerate(lattice):
            candidates = row[:count].astype(np.int64)
            scores = row[count : count * (1 + count)].reshape(count, count)[before]
            token, chance = sampler.pick(scores, position + 1 + at, candidates)
            before = int(np.flatnonzero(candidates == token)[0])
            tokens.append(token)
            chances.append(chance)
        return tokens, chances
