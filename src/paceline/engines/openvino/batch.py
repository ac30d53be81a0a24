"""The inputs of one call: which rows are computed, where each belongs, which of them get logits.

To attention a part of a prompt is one sequence, and so is each row of an answer, behind those
before it: there are two kernels, and which one a row gets depends on its role alone. Rows that only
fill up a call are a sequence of their own, in a cache block that belongs to nobody.
"""

from paceline.decoding.types import Block
from paceline.engines.openvino.graph import WANTED_ROWS
from paceline.engines.openvino.kv_sequence import OpenVinoSequence

_PADDING = 0
"""Token of a padding row: any will do."""


class Batch:
    """What goes into a call; blocks of different sequences are added one by one."""

    def __init__(self, least: int, *, threads: int, spare: int) -> None:
        """An empty call.

        Args:
            least: rows that it has at least; 1 says that rows may depend on how many there are.
            threads: that the engine computes with.
            spare: a cache block that belongs to nobody.
        """
        self.places: list[int] = []
        """For each block the row of the call at which it begins."""
        self._least, self._threads, self._spare = least, threads, spare
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._wanted: list[int] = []
        self._past: list[int] = []
        self._begins = [0]
        self._blocks: list[int] = []
        self._block_begins = [0]
        self._longest = 0
        self._mixed = False

    def add(self, slots: OpenVinoSequence, block: Block) -> None:
        """Run a block of a sequence, too."""
        own, at = len(block.tokens), len(self._ids)
        rows = attended(block, self._least)
        self.places.append(at)
        self._ids += (*block.tokens, *[_PADDING] * (rows - own))
        self._positions += range(slots.length, slots.length + rows)
        self._wanted += range(at + own - block.rows, at + own)
        if block.prefill:
            self._attend(slots.length, rows, slots.blocks(rows))
        else:
            for row in range(own):
                self._attend(slots.length + row, 1, slots.blocks(row + 1))

    def inputs(self) -> dict[str, list[int] | int]:
        """By name, for a graph with PagedAttention. Call it once, when all is added."""
        missing = max(self._least - len(self._ids), 0)
        if self._least > 1 and not (
            self._mixed or is_deterministic(len(self._past), missing, self._threads)
        ):
            missing = 2
        if missing:
            self._ids += [_PADDING] * missing
            self._positions += range(missing)
            self._attend(0, missing, [self._spare])
        return {
            "input_ids": self._ids,
            "position_ids": self._positions,
            "past_lens": self._past,
            "subsequence_begins": self._begins,
            "block_indices": self._blocks,
            "block_indices_begins": self._block_begins,
            "max_context_len": self._longest,
            # As many as there are rows at least, so that the head, too, always gets the same
            # number; and never one, which takes another kernel and a slow one.
            WANTED_ROWS: self._wanted + [0] * (self._least - len(self._wanted)),
        }

    def _attend(self, past: int, rows: int, blocks: list[int]) -> None:
        """One more sequence for attention."""
        self._past.append(past)
        self._begins.append(self._begins[-1] + rows)
        self._blocks += blocks
        self._block_begins.append(len(self._blocks))
        self._longest = max(self._longest, past + rows)
        self._mixed |= rows > 1


def attended(block: Block, least: int) -> int:
    """Rows that a block takes: a prompt's row alone would get the kernel of an answer's."""
    return max(len(block.tokens), min(least, 2)) if block.prefill else len(block.tokens)


def is_deterministic(rows: int, missing: int, threads: int) -> bool:
    """Whether `rows` single rows, and `missing` that fill up, get the kernel that they should.

    With fewer sequences than threads, and none of several rows, OpenVINO adds up what threads have
    found, in an order that is theirs (`exec_loop_bhl` in its executor_pa.cpp).
    """
    return missing > 1 or rows + missing >= threads
