"""A Core ML shard's inputs that depend on positions: RoPE tables, masks, cache write positions.

Depends on neither models nor sequences. Arrays are allocated once per number of rows, and a forward
pass updates only changed elements. They are float32 and contiguous, so Core ML does not copy them.

A pass of width 3 with 2 rows starting at position 2, in 6 slots; 0 attends, - is hidden:

    slot             0 1 2 3 4 5                      0 1 2 3 4 5
    row 0   mask     0 0 0 - - -     kv_write_mask    . . 1 . . .    its key goes to slot 2
    row 1            0 0 0 0 - -     (transposed)     . . . 1 . .
    row 2            0 0 0 0 0 -                      . . . . . .    padding is not written

A convolution's rows are in a ring buffer: position p is in slot p % conv_slots.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

HIDDEN = -1e4
"""Added to the score of masked slots: finite in float16, unlike -inf."""


class CallInputs:
    def __init__(
        self, width: int, cos: Floats, sin: Floats, *, conv_slots: int = 0, lags: int = 0
    ) -> None:
        """Prepare for passes with `width` rows; `cos` and `sin` are [slots, r].

        A convolution reads `lags` earlier rows from a ring buffer with `conv_slots` rows, at least
        width + lags; 0: the model has no convolutions.
        """
        slots, r = cos.shape
        self._cos, self._sin = cos, sin
        self._width, self._slots, self._conv_slots, self._lags = width, slots, conv_slots, lags
        self._start = self._rows = 0
        self._mask = np.full((1, 1, width, slots), HIDDEN, np.float32)
        self._write = np.zeros((1, 1, slots, width), np.float32)
        self.arrays: dict[str, Floats] = {
            "rope_cos": np.zeros((width, r), np.float32),
            "rope_sin": np.zeros((width, r), np.float32),
            "attn_mask": self._mask,
            "kv_write_mask": self._write,
        }
        if conv_slots:
            self.arrays["window_write"] = np.zeros((1, 1, conv_slots, width), np.float32)
            self.arrays["window_read"] = np.zeros((1, lags, width, conv_slots), np.float32)
        for row in range(width):
            self._mask[0, 0, row, : row + 1] = 0

    def for_rows(self, start: int, rows: int) -> Mapping[str, Floats]:
        """Return the inputs of a pass whose first row is at position `start`.

        Rows after the first `rows` are padding: they are not written to the cache, and their
        outputs are meaningless. The next pass changes the returned arrays.
        """
        width, slots = self._width, self._slots
        self._update_mask(start)
        positions = np.minimum(np.arange(start, start + width), slots - 1)
        np.take(self._cos, positions, axis=0, out=self.arrays["rope_cos"])
        np.take(self._sin, positions, axis=0, out=self.arrays["rope_sin"])
        old = np.arange(self._rows)
        self._write[0, 0, self._start + old, old] = 0
        new = np.arange(rows)
        self._write[0, 0, start + new, new] = 1
        if self._conv_slots:
            self._set_conv(start, rows)
        self._start, self._rows = start, rows
        return self.arrays

    def _update_mask(self, start: int) -> None:
        """Let row t attend to slots up to start + t, instead of up to the old start + t."""
        low, high = sorted((self._start, start))
        seen = 0.0 if start > self._start else HIDDEN
        for row in range(self._width):
            self._mask[0, 0, row, low + row + 1 : high + row + 1] = seen

    def _set_conv(self, start: int, rows: int) -> None:
        write, read = self.arrays["window_write"], self.arrays["window_read"]
        write.fill(0)
        read.fill(0)
        row = np.arange(rows)
        write[0, 0, (start + row) % self._conv_slots, row] = 1
        for lag in range(self._lags):
            before = start + row - lag - 1
            known = before >= 0
            read[0, lag, row[known], before[known] % self._conv_slots] = 1
