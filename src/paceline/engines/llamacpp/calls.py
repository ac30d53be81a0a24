"""Calls that measure the row classes of a model."""

import numpy as np

from paceline.decoding.types import Logits
from paceline.engines.llamacpp.binding import ContextSettings, State
from paceline.engines.llamacpp.contexts import whole
from paceline.engines.llamacpp.native import NativeModel
from paceline.engines.llamacpp.sequence import call
from paceline.engines.row_classes import LONGEST, RowRange

MOST_ROWS = 256
"""Most rows of a call."""


class Calls:
    """The calls of a measurement, with random tokens; see `row_classes.Prober`."""

    def __init__(
        self, model: NativeModel, context_length: int, threads: int, rollback: int = 0
    ) -> None:
        """Make a context; see `ContextSettings`."""
        self.room = min(context_length, LONGEST)
        slots = whole(self.room + MOST_ROWS)
        self._sequence = model.sequence(ContextSettings(slots, MOST_ROWS, threads, rollback))
        self._tokens = np.random.default_rng(0).integers(0, model.vocab_size, slots).tolist()
        self._states = rollback > 0
        self._kept: tuple[int, State] | None = None  # recurrent state after the last prefill

    def prefill(self, length: int, rows: RowRange) -> None:
        """See `Prober.prefill`."""
        if length < self._sequence.length:
            self._go_back(length)
        missing = self._tokens[self._sequence.length : length]
        for part in rows.split(len(missing)):
            call(
                self._sequence,
                missing,
                part,
                first=length,
                least=rows.least,
                most_outputs=1,
                least_outputs=1,
            )
        if self._states:
            self._kept = length, self._sequence.recurrent_state()

    def rows(self, length: int, count: int, outputs: int) -> Logits:
        """See `Prober.rows`."""
        self._go_back(length)
        assert self._sequence.length == length
        return self._sequence.decode(
            self._tokens[length : length + count], slice(0, outputs)
        ).copy()

    def close(self) -> None:
        """Free the context."""
        self._sequence.context.close()

    def _go_back(self, length: int) -> None:
        """Go back to `length` positions; with recurrent layers, to 0 where that cannot be.

        It can for `rows`, which begins where a prefill ended, or where the last call did.
        """
        if self._sequence.can_truncate(length):
            self._sequence.truncate(length)
        elif self._kept is not None and self._kept[0] == length:
            self._sequence.restore_recurrent(self._kept[1], length)
        else:
            self._sequence.truncate(0)
