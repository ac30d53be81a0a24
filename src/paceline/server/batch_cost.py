"""What a call of several sequences takes: what a row adds, what a sequence adds, and the rest.

A sequence alone has copies of the graph for the usual numbers of rows, and its costs go up in
steps. A call of several has any number of rows, so there each costs what it costs on the whole.
What a sequence adds (its keys and values are read again in every call) is learnt from the calls
themselves: it depends on how long the texts are, and a few measured calls are mostly noise.
"""

from paceline.decoding.costs import CostTable

_WEIGHT = 1 / 32
"""Of the newest call in what is believed."""

_LEAST_ROW = 1 / 64
"""Of a call of one row: what a further one adds at least, for what was measured may be flat."""


class SharedCost:
    """Seconds of calls of several sequences, by how many those and their rows are."""

    def __init__(self, alone: CostTable) -> None:
        """Begin with what a sequence alone costs."""
        self.row = max(alone.per_row, alone(1) * _LEAST_ROW)
        """Seconds that a row adds."""
        self._call = max(alone(1) - self.row, 0.0)
        self._sequence: float | None = None

    def __call__(self, sequences: int, rows: int) -> float:
        """Seconds of a call of so many sequences with so many rows in all."""
        return self._call + (self._sequence or 0.0) * sequences + self.row * rows

    def learn(self, sequences: int, rows: int, seconds: float) -> None:
        """Note what such a call took."""
        came = max(seconds - self._call - self.row * rows, 0.0) / sequences
        if self._sequence is None:
            self._sequence = came
        self._sequence += _WEIGHT * (came - self._sequence)
