"""Whether the requests of a batch ask their drafters: while drafts are worth the time of asking.

A row delays all requests of its call, so with many of them few drafts pay; asking them takes time
in every call all the same. Tokens per call at the rate of the batch (openvino, SmolLM2 135M,
2026-11-26):

    requests                     2      8      16     32
    expected gain of drafts      0.28   0.20   0.11   < 0
    time of asking               0.03   0.18   0.43   1.02    closed from 16 on

Independent of engines and drafters, and of what a row costs: policies weigh that in their gain.
"""

_MOST_LOSS = 1.0
"""Tokens that asking may lose before the gate closes."""

_MOST_CREDIT = 4.0
"""Tokens that asking has gained before and may lose again: gains come in bursts."""

_CLOSED_CALLS = 31
"""Calls for which the gate stays closed. Asking again loses a token, 0.1 % of 32 calls of 32."""


class DraftGate:
    """Opens and closes for all requests of a call at once."""

    def __init__(self) -> None:
        """Begin open."""
        self._credit = 0.0
        self._closed = 0  # calls left

    def asks(self) -> bool:
        """Whether the next call asks drafters; if so, `learn` follows."""
        if not self._closed:
            return True
        self._closed -= 1
        return False

    def learn(self, gain: float, price: float) -> None:
        """Add the expected gain of a call's drafts less the price of asking, both in tokens."""
        self._credit = min(self._credit + gain - price, _MOST_CREDIT)
        if self._credit < -_MOST_LOSS:
            self._credit, self._closed = 0.0, _CLOSED_CALLS
