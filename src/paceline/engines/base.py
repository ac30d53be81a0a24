"""Engine protocol: run blocks of several sequences in one call, return the logits of every row.

Independent of sampling, acceptance and text. Invariants, proven by the
conformance tests: slots are append-only (see `KVSequence`), and a row's logits depend neither on
the number of rows in the call, nor on the row's place, nor on the other sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Best, Block, Logits, Taps
from paceline.errors import InvalidRequest
from paceline.storage.progress import QUIET, Progress
from paceline.system.machine import cpu_cores, memory_bytes

COMPUTE_UNITS = ("all", "cpu-only", "cpu-and-gpu", "cpu-and-ne")
"""Where Core ML may run a model; `ct.ComputeUnit` has the same names."""

_MOST = {"contexts": 4096, "parallel": 32, "cache_tokens": 2**31 - 1}
"""Setting -> its largest value, of those from 1 on."""

_CACHE_BYTES = 2 << 30
"""Default limit of a model's KV cache, in bytes."""


class KVSequence(Protocol):
    """One sequence in an engine's KV cache. A slot holds the keys and values of one position.

    A block of T rows writes slots [length, length + T). The mask hides slots that are not committed
    and the next block overwrites them: nothing is copied or rolled back.
    """

    @property
    def length(self) -> int:
        """Committed slots."""
        ...

    @property
    def shareable_length(self) -> int:
        """Length of the prefix whose KV equals a fresh prefill bit for bit.

        Only this prefix may be shared; later slots serve the continuation of this sequence alone.
        """
        ...

    @property
    def unused(self) -> int:
        """Allocated slots after `length`: rows that fit even when the cache is full."""
        ...

    def commit(self, rows: int) -> None:
        """Keep the first `rows` rows of the last block."""
        ...

    def rewind(self, length: int) -> None:
        """Drop all slots from `length` on, and the rest of a shared KV block before it."""
        ...

    def fork_length(self, length: int) -> int:
        """The length that `fork(length)` would have."""
        ...

    def fork(self, length: int) -> "KVSequence":
        """A new sequence that shares up to `length` slots of this one's shareable prefix.

        With recurrent layers: up to a position whose state was kept. Its own `length` is the
        number of shared slots.
        """
        ...

    def close(self) -> None:
        """Free the slots. Further calls do nothing."""
        ...


class KVState(NamedTuple):
    """A copy of a sequence's KV."""

    data: npt.NDArray[np.uint8]
    """[bytes], in the engine's own form."""
    length: int
    """Its slots."""


@runtime_checkable
class KeepsKV(Protocol):
    """An engine whose KV can be copied out of it, and put back into another of the same kind."""

    @property
    def keeps_kv(self) -> bool:
        """Whether it can with this model; recurrent layers have states besides KV."""
        ...

    def state_of(self, sequence: KVSequence) -> KVState:
        """A copy of a sequence, all of which is shareable."""
        ...

    def restore(self, sequence: KVSequence, state: KVState, length: int) -> None:
        """Replace a sequence by the first `length` slots of a state, as if they were prefilled.

        Raises CacheFull, or ModelError for a state that cannot be read; the sequence is then empty.
        """
        ...


@runtime_checkable
class Closes(Protocol):
    """An engine that holds more than Python's objects."""

    def close(self) -> None:
        """Free it; its sequences are gone."""
        ...


class StepResult(NamedTuple):
    """Result of one call. The arrays are views of engine memory, valid until the next call."""

    logits: Sequence[Logits]
    """Per block, [block.rows, vocab] float32; [0, vocab] where `best` replaces them."""
    taps: Sequence[Taps]
    """Per block, tap name -> hidden states [T, d] float32; empty without taps."""
    seconds: float
    """Time in the runtime's own call, without the preparation of inputs."""
    best: Sequence[Best | None] = ()
    """Per block, its best tokens if it asked for those alone, else None; empty: all None."""
    parts: Mapping[str, float] = MappingProxyType({})
    """Seconds by part of the call, if the engine measures parts."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine. Raises InvalidRequest if a value is out of range."""

    cache_tokens: int | None = None
    """Slots of the KV cache, for all sequences together; None: see `slots`."""
    contexts: int = 1
    """Full contexts that the cache holds if `cache_tokens` is None."""
    parallel: int = 1
    """Sequences that are to share calls: for more than one, llamacpp takes a library that can."""
    min_rows: int = 2
    """2 is exact. 1 computes less for plain decoding, but a row's bits then depend on T."""
    device: str = "auto"
    """`cpu`, `gpu`, or the name of a device of llama.cpp's library; `auto`: a GPU that takes all of
    the model, else the processor."""
    kv: str | None = None
    """Type of keys and values: "q8_0" takes half the memory; None: the engine's own."""
    taps: tuple[int, ...] = ()
    """Layers whose output hidden states every step returns, from 0."""
    threads: int | None = None
    """CPU threads; None: the engine's default."""
    compute_units: str | None = None
    """Core ML compute units, one of `COMPUTE_UNITS`; None: cpu-and-ne."""
    measurements: Path | None = None
    """Folder in which an engine keeps what it measures of models; None: nothing is kept."""
    packed: Path | None = None
    """Folder for copies of weights in an engine's own form; None: no copies."""
    progress: Progress = field(default=QUIET, compare=False)
    """Shows work that is done once for a model."""

    def __post_init__(self) -> None:
        if self.min_rows not in (1, 2):
            raise InvalidRequest(f"rows is {self.min_rows}; expected 2 (exact) or 1")
        for name, most in {**_MOST, "threads": cpu_cores()}.items():
            value, why = getattr(self, name), " (one per CPU), or None" * (name == "threads")
            if value is not None and not _within(value, most):
                expected = f"a whole number from 1 to {most}{why}"
                raise InvalidRequest(f"{name} is {value!r:.40}; expected {expected}")
        if self.kv not in (None, "q8_0"):
            raise InvalidRequest(f"kv is {self.kv!r}; expected q8_0, or nothing")
        if self.compute_units not in (None, *COMPUTE_UNITS):
            raise InvalidRequest(
                f"compute_units is {self.compute_units!r}; expected {', '.join(COMPUTE_UNITS)}"
            )

    def slots(self, context_length: int, slot_bytes: int) -> int:
        """Slots of the KV cache for a model with `slot_bytes` bytes of keys and values per token.

        Without `cache_tokens`: what fits into 2 GiB, or for several contexts into a quarter of the
        machine's memory if that is more.
        """
        if self.cache_tokens is not None:
            return self.cache_tokens
        most = _CACHE_BYTES if self.contexts == 1 else max(_CACHE_BYTES, memory_bytes() // 4)
        return min(self.contexts * context_length, most // max(slot_bytes, 1))


def _within(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


class Engine(Protocol):
    """A runtime with a loaded model; see the top of this file."""

    name: str
    vocab_size: int
    """Width of a row of logits."""
    context_length: int
    """Most slots of one sequence."""
    taps: tuple[int, ...]
    """Layers whose hidden states every step returns, as `tap.N`."""
    min_rows: int
    """1: a row's bits may depend on its call, and no result is `exact`. Else the least rows of a
    sequence in a call, which the engine pads itself, or 2 where one row has the same bits."""
    shares_calls: bool
    """Whether a step reads the weights once for all its sequences; False: its blocks run one after
    another, each as long as alone."""
    compared_keys: float
    """Tokens of a prompt and its answer up to which rows were compared; with more, `exact` is
    false."""

    @property
    def free_slots(self) -> int:
        """Slots that no sequence holds."""
        ...

    @property
    def block_size(self) -> int:
        """Slots of a KV block; a sequence holds whole blocks."""
        ...

    def freed_by(self, sequences: Sequence[KVSequence]) -> int:
        """Slots that closing all of `sequences` would free: those that no other sequence holds."""
        ...

    def open(self) -> KVSequence:
        """A new, empty sequence."""
        ...

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Run blocks of different sequences in one call, without committing their slots.

        Raises CacheFull if the cache has no slots for the blocks. Nothing was run.
        """
        ...

    def rest(self) -> None:
        """Free memory that calls alone need, at a time without any; sequences keep every bit."""
        ...

    def describe(self) -> dict[str, str]:
        """Everything that costs and exactness depend on: runtime version, processor, settings.

        Also constants that a developer changes when the engine computes rows in another way.
        """
        ...
