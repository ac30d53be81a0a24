"""What every engine does: run blocks of sequences in one call, and return a row of logits a token.

An engine knows nothing of sampling, acceptance or text. Invariants, proven by the
conformance tests: slots are append-only (see `KVSequence`), and a row's logits depend neither on
the number of rows in the call, nor on the row's place, nor on the other sequences.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from paceline.decoding.types import Best, Block, Logits, Taps
from paceline.errors import InvalidRequest

COMPUTE_UNITS = ("all", "cpu-only", "cpu-and-gpu", "cpu-and-ne")
"""Where Core ML may run a model; `ct.ComputeUnit` has the same names."""

_MOST_THREADS = 4096

_CACHE_BYTES = 2 << 30
"""Keys and values that a model gets at most where nothing says otherwise."""

_MOST_CACHE_TOKENS = 2**31 - 1


class KVSequence(Protocol):
    """One sequence's slots in an engine's key/value cache.

    A block's keys and values go to slots [length, length + T). What is not committed is garbage
    that the mask hides and the next block overwrites: nothing is copied or rolled back.
    """

    @property
    def length(self) -> int:
        """Slots that belong to the sequence."""
        ...

    @property
    def shareable_length(self) -> int:
        """Slots, from the first on, that reading their tokens as a prompt would give bit for bit.

        Those behind them are for going on with this answer; others must not begin with them.
        """
        ...

    @property
    def unused(self) -> int:
        """Slots after `length` that it holds: rows that fit, however full the cache is."""
        ...

    def commit(self, rows: int) -> None:
        """Keep the first `rows` rows of the last block."""
        ...

    def rewind(self, length: int) -> None:
        """Forget all slots from `length` on; a few before it go too when they are shared."""
        ...

    def fork(self, length: int) -> "KVSequence":
        """A new sequence that shares this one's first slots, as many of `length` as can be reused.

        Its `length` says how many those are.
        """
        ...

    def close(self) -> None:
        """Give the slots back. Further calls do nothing."""
        ...


class StepResult(NamedTuple):
    """What one call brought. The arrays are views of the engine's memory: read before the next."""

    logits: Sequence[Logits]
    """For each block, [block.rows, vocab] float32; no rows where `best` has them."""
    taps: Sequence[Taps]
    """For each block, the named hidden states of all its rows; empty without taps."""
    seconds: float
    """Time in the engine's own call, without the preparation of its inputs."""
    best: Sequence[Best | None] = ()
    """For each block its best tokens, where that is all it asked for; empty: for none."""
    parts: Mapping[str, float] = MappingProxyType({})
    """Seconds by part of the call, for an engine that has parts."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine is set up.

    Raises:
        InvalidRequest: a value is out of range.

    """

    cache_tokens: int | None = None
    """Slots for all sequences together; None: see `slots`."""
    contexts: int = 1
    """Full contexts that the cache holds where `cache_tokens` does not say."""
    min_rows: int = 2
    """2 is exact. 1 computes less for plain decoding, and rows then depend on T."""
    taps: tuple[int, ...] = ()
    """Layers whose output hidden states every step returns."""
    threads: int | None = None
    """CPU threads; None leaves it to the engine."""
    compute_units: str | None = None
    """Core ML's, on a Mac: all, cpu-only, cpu-and-gpu or cpu-and-ne; None: cpu-and-ne."""

    def __post_init__(self) -> None:
        if self.min_rows not in (1, 2):
            raise InvalidRequest(f"rows is {self.min_rows}; expected 2 (exact) or 1")
        if self.contexts < 1:
            raise InvalidRequest(f"contexts is {self.contexts}; expected 1 or more")
        if self.cache_tokens is not None and not _within(self.cache_tokens, _MOST_CACHE_TOKENS):
            raise InvalidRequest(
                f"cache_tokens is {self.cache_tokens}; expected a whole number from 1 to "
                f"{_MOST_CACHE_TOKENS}"
            )
        if self.threads is not None and not _within(self.threads, _MOST_THREADS):
            raise InvalidRequest(
                f"threads is {self.threads}; expected a whole number from 1 to {_MOST_THREADS}"
            )
        if self.compute_units not in (None, *COMPUTE_UNITS):
            raise InvalidRequest(
                f"compute_units is {self.compute_units!r}; expected {', '.join(COMPUTE_UNITS)}"
            )

    def slots(self, context_length: int, slot_bytes: int) -> int:
        """Slots of the cache for a model whose keys and values take `slot_bytes` a token.

        Without `cache_tokens` that is what fits into 2 GiB, and where several contexts are wanted
        into a quarter of the machine's memory, if that is more.
        """
        if self.cache_tokens is not None:
            return self.cache_tokens
        most = _CACHE_BYTES if self.contexts == 1 else max(_CACHE_BYTES, _memory_bytes() // 4)
        return min(self.contexts * context_length, most // max(slot_bytes, 1))


def _within(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Engine(Protocol):
    """Who verifies."""

    name: str
    vocab_size: int
    """Width of a row of logits."""
    context_length: int
    """The most slots one sequence can have."""
    taps: tuple[int, ...]
    """Layers whose hidden states every step returns, as `tap.N`."""
    min_rows: int
    """Rows that a sequence gets in a call at least; an engine pads on its own."""

    @property
    def free_slots(self) -> int:
        """Slots that no sequence holds."""
        ...

    @property
    def block_size(self) -> int:
        """Slots come in blocks of so many: a sequence holds whole ones."""
        ...

    def freed_by(self, sequences: Sequence[KVSequence]) -> int:
        """Slots that closing all of `sequences` would free: those that no other sequence holds."""
        ...

    def open(self) -> KVSequence:
        """A new, empty sequence."""
        ...

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Run blocks of different sequences in one call; none of their slots is committed yet.

        Raises:
            CacheFull: there are no slots for the blocks. Nothing was run.
        """
        ...

    def describe(self) -> dict[str, str]:
        """What its costs and its exactness depend on: runtime version, processor, settings.

        And words that are changed by hand when the engine computes rows in another way.
        """
        ...
