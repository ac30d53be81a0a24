"""Engine protocol: run blocks of several sequences in one forward pass, return every row's logits.

Independent of sampling, acceptance and text. The conformance tests verify two invariants: slots
are append-only (see `KVSequence`), and a row's logits depend neither on the number of rows in the
forward pass, nor on the row's place, nor on the other sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Best, Block, Logits, Taps
from paceline.errors import InvalidRequest
from paceline.storage.progress import QUIET, Progress
from paceline.system.machine import cpu_cores, memory_bytes

COMPUTE_UNITS = ("all", "cpu-only", "cpu-and-gpu", "cpu-and-ne")
"""Where Core ML may run a model; `ct.ComputeUnit` has the same names."""

_MAX_VALUES = {"contexts": 4096, "parallel": 32, "cache_tokens": 2**31 - 1}
"""Setting -> its largest value; the smallest is 1."""

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
        """Length of the prefix whose KV is bit-identical to a fresh prefill.

        Only this prefix may be shared; later slots serve the continuation of this sequence alone.
        """
        ...

    def commit(self, rows: int) -> None:
        """Keep the first `rows` rows of the last block."""
        ...

    def rewind(self, length: int) -> None:
        """Drop all slots from `length`; more if the engine cannot end there, so read `length`."""
        ...

    def fork_length(self, length: int) -> int:
        """Return the length that `fork(length)` would have."""
        ...

    def fork(self, length: int) -> "KVSequence":
        """Create a sequence that shares up to `length` slots of this one's shareable prefix.

        With recurrent layers, up to a position whose state was saved. The new sequence's `length`
        is the number of shared slots.
        """
        ...

    def close(self) -> None:
        """Free the slots. Further calls do nothing."""
        ...


class KVState(NamedTuple):
    """A copy of a sequence's KV."""

    data: npt.NDArray[np.uint8]
    """[bytes], in the engine's own format."""
    length: int


class StepResult(NamedTuple):
    """Result of one forward pass. Its arrays are engine memory, valid until the next pass."""

    logits: Sequence[Logits]
    """Per block, [block.rows, vocab] float32; [0, vocab] where `best` replaces them."""
    taps: Sequence[Taps]
    """Per block, tap name -> hidden states [T, d] float32; empty without taps."""
    seconds: float
    """Seconds in the runtime's own call, without the preparation of inputs."""
    best: Sequence[Best | None] = ()
    """Per block, its best tokens if only they were requested, else None; empty: all None."""
    parts: Mapping[str, float] = MappingProxyType({})
    """Seconds by part of the forward pass, if the engine measures parts."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine. Raises InvalidRequest if a value is out of range."""

    cache_tokens: int | None = None
    """Slots of the KV cache, for all sequences together; None: see `slots`."""
    contexts: int = 1
    """Full contexts that the cache holds if `cache_tokens` is None."""
    parallel: int = 1
    """Sequences that should share forward passes; above one, llamacpp uses a library that can."""
    min_rows: int = 2
    """2 is exact. 1 computes less in plain decoding, but a row's bits then depend on T."""
    device: str = "auto"
    """`cpu`, `gpu`, or the name of a llama.cpp device; `auto`: a GPU if all of the model fits, else
    the CPU."""
    kv_cache_type: str | None = None
    """KV cache type: "q8_0" needs half the memory; None: the engine's default."""
    taps: tuple[int, ...] = ()
    """Layers whose output hidden states every step returns, from 0."""
    threads: int | None = None
    """CPU threads; None: the engine's default."""
    compute_units: str | None = None
    """Core ML compute units, one of `COMPUTE_UNITS`; None: cpu-and-ne."""
    measurements: Path | None = None
    """Folder for the engine's measurements of models; None: they are not saved."""
    packed: Path | None = None
    """Folder for copies of weights in the engine's own format; None: no copies."""
    progress: Progress = field(default=QUIET, compare=False)
    """Shows the progress of work that is done once per model."""

    def __post_init__(self) -> None:
        if self.min_rows not in (1, 2):
            raise InvalidRequest(f"rows is {self.min_rows}; expected 2 (exact) or 1")
        for name, max_value in {**_MAX_VALUES, "threads": cpu_cores()}.items():
            value, why = getattr(self, name), " (one per CPU), or None" * (name == "threads")
            if value is not None and not (type(value) is int and 1 <= value <= max_value):
                expected = f"a whole number from 1 to {max_value}{why}"
                raise InvalidRequest(f"{name} is {value!r:.40}; expected {expected}")
        if self.kv_cache_type not in (None, "q8_0"):
            raise InvalidRequest(
                f"kv_cache_type is {self.kv_cache_type!r}; expected q8_0, or nothing"
            )
        if self.compute_units not in (None, *COMPUTE_UNITS):
            raise InvalidRequest(
                f"compute_units is {self.compute_units!r}; expected {', '.join(COMPUTE_UNITS)}"
            )

    def slots(self, context_length: int, slot_bytes: int) -> int:
        """Return the slots of the KV cache for a model with `slot_bytes` bytes of KV per token.

        Without `cache_tokens`: as many as fit into 2 GiB, or for several contexts into a quarter of
        the machine's memory if that is more.
        """
        if self.cache_tokens is not None:
            return self.cache_tokens
        max_bytes = _CACHE_BYTES if self.contexts == 1 else max(_CACHE_BYTES, memory_bytes() // 4)
        return min(self.contexts * context_length, max_bytes // max(slot_bytes, 1))


class Engine(Protocol):
    """A runtime with a loaded model; see the top of this file.

    It may also have `close`, and export KV as `LlamaCppEngine` does (`can_export_kv`).
    """

    name: str
    vocab_size: int
    """Width of a row of logits."""
    context_length: int
    """Maximum slots of one sequence."""
    taps: tuple[int, ...]
    """Layers whose hidden states every step returns, as `tap.N`."""
    min_rows: int
    """1: a row's bits may depend on its forward pass, and no result is `exact`. Else the minimum
    rows of a sequence per pass (the engine pads them), or 2 where one row has the same bits."""
    shares_calls: bool
    """True if a step reads the weights once for all its sequences; False: its blocks run one after
    another, each as slow as alone."""
    compared_keys: float
    """Maximum prompt and output tokens for which rows were compared; beyond it, `exact` is
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
        """Count the slots that closing `sequences` would free: no other sequence holds them."""
        ...

    def open(self) -> KVSequence:
        """Create an empty sequence."""
        ...

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        """Run blocks of different sequences in one forward pass, without committing their slots.

        Raises CacheFull, before anything runs, if the cache lacks slots for the blocks.
        """
        ...

    def rest(self) -> None:
        """Free memory that only forward passes need, between requests; sequences keep every bit."""
        ...

    def describe(self) -> dict[str, str]:
        """Return everything that costs and exactness depend on: runtime version, CPU, settings.

        Includes constants that a developer changes when the engine computes rows differently.
        """
        ...
