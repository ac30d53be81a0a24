"""The inputs of one call: which rows are computed, where each belongs, which of them get logits.

Rows that only fill up a call are of no sequence, or lie behind the end of one: what they write to
the cache is overwritten before it is ever seen.
"""

from paceline.decoding.types import Block
from paceline.engines.openvino.graph import ATTENTION_ROWS, KEPT_ROWS, WANTED_ROWS
from paceline.engines.slots import BlockTable

_PADDING = 0
"""Token of a padding row: any will do."""


class Call:
    """What goes into a call; blocks of different sequences are added one by one."""

    def __init__(self, least: int, *, spread: bool) -> None:
        """Give each sequence `least` rows at least: with `spread` in attention, else everywhere."""
        self.places: list[int] = []
        """For each block the row of the call at which it begins."""
        self._least, self._spread = least, spread
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._past: list[int] = []
        self._begins = [0]
        self._attended: list[int] = []
        self._kept: list[int] = []
        self._wanted: list[int] = []
        self._blocks: list[int] = []
        self._block_begins = [0]
        self._longest = 0

    def add(self, table: BlockTable, block: Block) -> None:
        """Run a block of a sequence, too."""
        own, at = len(block.tokens), len(self._ids)
        rows = max(own, self._least)
        computed = own if self._spread else rows
        self.places.append(at)
        self._ids += (*block.tokens, *[_PADDING] * (computed - own))
        self._positions += range(table.length, table.length + computed)
        self._kept += range(self._begins[-1], self._begins[-1] + own)
        # Attention gets the last row once more where there are too few.
        self._attended += (*range(at, at + own), *[at + own - 1] * (rows - own))
        self._wanted += range(at + own - block.rows, at + own)
        self._past.append(table.length)
        self._begins.append(self._begins[-1] + rows)
        self._blocks += table.blocks(rows)
        self._block_begins.append(len(self._blocks))
        self._longest = max(self._longest, table.length + rows)

    def inputs(self) -> dict[str, list[int] | int]:
        """By name, for a graph with PagedAttention. Call it once, when all is added."""
        short = [0] * (self._least - len(self._ids))  # one row of layers takes another kernel, too
        found: dict[str, list[int] | int] = {
            "input_ids": self._ids + short,
            "position_ids": self._positions + short,
            "past_lens": self._past,
            "subsequence_begins": self._begins,
            "block_indices": self._blocks,
            "block_indices_begins": self._block_begins,
            "max_context_len": self._longest,
            # As many as there are rows at least, so that the head, too, always gets the same
            # number; and never one, which takes another kernel and a slow one.
            WANTED_ROWS: self._wanted + [0] * (self._least - len(self._wanted)),
        }
        if self._spread:
            found |= {ATTENTION_ROWS: self._attended, KEPT_ROWS: self._kept + short}
        return found
