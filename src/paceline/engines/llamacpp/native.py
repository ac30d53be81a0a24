"""A model opened in a llama.cpp library, its contexts, and the sequences in them.

In ik_llama.cpp a context has one sequence: two in a pass end the process or change bits. Contexts
share the model's weights, which are mapped from the file. Invariant: a failed pass raises; the
library's own asserts end the process, so only calls that were tested are made.
"""

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Logits, tap_name
from paceline.engines.llamacpp.binding import (
    MIN_CONTEXT,
    PARTIAL_STATE,
    Binding,
    ContextSettings,
    Offload,
    State,
    interrupts_after,
)
from paceline.errors import ModelError

_SOME_ROWS = 16
"""Rows of the passes that measure the size of a position; a quarter of them on a device."""

_FLOATS = ctypes.POINTER(ctypes.c_float)


class Sizes(NamedTuple):
    """A sequence's memory in bytes."""

    slot: int
    """Keys and values of one position."""
    state: int
    """Size of all recurrent states."""


class _Open:
    """A reference count of a model and its contexts; the last one frees the model.

    Python collects a model and its contexts in any order, and the library needs the model to free
    a context.
    """

    def __init__(self, binding: Binding, model: int) -> None:
        self._binding, self._model = binding, model
        self._count = 0
        self.add()

    def add(self) -> None:
        self._count += 1
        self._binding.open += 1

    def drop_context(self, pointer: int) -> None:
        self._binding.library.llama_free(ctypes.c_void_p(pointer))
        self.drop()

    def drop(self) -> None:
        self._count -= 1
        self._binding.open -= 1
        if not self._count:
            self._binding.free_model(self._model)


class NativeModel:
    """A mapped GGUF file."""

    def __init__(
        self,
        binding: Binding,
        path: Path,
        *,
        packed: bool = False,
        quantized: bool = False,
        offload: Offload | None = None,
        mtp: bool = False,
    ) -> None:
        """Map `path`, a packed copy of a file or the file itself.

        See `ContextSettings` for `quantized`, and `Binding.load` for `offload` and `mtp`.

        Raises ModelError, with the library's own words, if it refuses the file.
        """
        _check_room(binding)
        self.binding = binding
        self.path, self.packed, self.quantized, self.offload = path, packed, quantized, offload
        binding.errors.clear()
        with interrupts_after():
            pointer = binding.load(path, offload, mtp)
            if pointer:
                self.open = _Open(binding, pointer)
                self._drop = finalize(self, self.open.drop)
        if not pointer:
            raise ModelError(
                f"{binding.name} cannot open {path}: {binding.errors.reason()}; "
                + ("use --device cpu, or " * (offload is not None))
                + "download the file again, or use another quantization"
            )
        self.pointer: int = pointer
        self.vocab_size = binding.vocab_size(pointer)
        window = binding.has_window(pointer)
        self.heads = None if window else binding.heads(pointer)
        """Attention heads, if all layers have the same number and no window."""
        self.span = MIN_CONTEXT if offload else binding.window_span * window
        """No pass crosses a multiple of this position; 0: any may."""
        self.recurrent = binding.is_recurrent(pointer)
        """True if some layers have a state instead of keys and values."""
        fault = None
        if quantized and not binding.has_whole_groups(pointer):
            self.close()
            raise ModelError(
                f"{path} has head sizes that are not multiples of 32, so keys and values cannot be "
                "in q8_0; remove --kv-cache-type"
            )
        if self.recurrent and not binding.rolls_back:
            fault = "recurrent layers"
        elif self.recurrent and window:
            fault = "recurrent layers and an attention window"
        elif self.recurrent and offload:
            fault = f"recurrent layers on {offload.device.name}"
        if fault:
            self.close()
            raise ModelError(
                f"{path} has {fault}, whose states {binding.name} cannot roll back; "
                "use a model of another family"
            )

    def sizes(self, threads: int) -> Sizes:
        """Measure the memory of a sequence.

        Raises ModelError for recurrent layers that cannot be rolled back.
        """
        rollback = int(self.recurrent)
        settings = ContextSettings(MIN_CONTEXT, _SOME_ROWS, threads, rollback)
        (sequence,) = self.context(settings).sequences
        rows = _SOME_ROWS // 4 if self.offload else _SOME_ROWS
        sizes = []
        for _ in range(2):
            sequence.decode([0] * rows, slice(0, 0))
            sizes.append(self.binding.state_size(sequence.context.pointer, sequence.number))
        state = sequence.state(PARTIAL_STATE).size if self.recurrent else 0
        sequence.context.close()
        return Sizes((sizes[1] - sizes[0]) // rows, state)

    def close(self) -> None:
        """Unmap the file once its contexts are closed. Further calls do nothing."""
        self._drop()

    def context(self, settings: ContextSettings) -> "NativeContext":
        """Create a context with empty sequences. Raises ModelError if memory is insufficient."""
        on_device = self.offload is not None
        return NativeContext(self, settings._replace(quantized=self.quantized, offloaded=on_device))


class Rows(NamedTuple):
    """Rows of one sequence in a pass."""

    sequence: "NativeSequence"
    tokens: Sequence[int]
    """Token ids that run after the sequence's `length` positions."""
    outputs: slice
    """Rows that need logits; a slice with start and stop."""


class _Batch:
    """Arrays of a `llama_batch`, which stay alive between passes."""

    def __init__(self, struct: type[ctypes.Structure], rows: int) -> None:
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(rows, np.int32)
        self._outputs = np.zeros(rows, np.int8)
        self._counts = np.ones(rows, np.int32)
        self._sequences = np.zeros(rows, np.int32)
        pointer = ctypes.POINTER(ctypes.c_int32)
        first = self._sequences.ctypes.data
        self._ids = (pointer * rows)(
            *[ctypes.cast(first + row * self._sequences.itemsize, pointer) for row in range(rows)]
        )
        arrays: dict[str, npt.NDArray[Any]] = {
            "token": self._tokens,
            "pos": self._positions,
            "n_seq_id": self._counts,
            "logits": self._outputs,
        }
        self._struct = struct()
        types: dict[str, Any] = {field[0]: field[1] for field in struct._fields_}
        for name, array in arrays.items():
            setattr(self._struct, name, array.ctypes.data_as(types[name]))
        self._struct.seq_id = ctypes.cast(self._ids, types["seq_id"])

    def filled(self, work: Sequence[Rows]) -> Any:
        count = 0
        for sequence, tokens, outputs in work:
            rows, start = slice(count, count + len(tokens)), sequence.length
            self._tokens[rows] = tokens
            self._positions[rows] = np.arange(start, start + len(tokens))
            self._sequences[rows] = sequence.number
            self._outputs[rows] = 0
            self._outputs[rows][outputs] = 1
            count = rows.stop
        self._struct.n_tokens = count
        return self._struct


class NativeContext:
    """Keys and values of some sequences, their recurrent states, and the memory of passes."""

    def __init__(self, model: NativeModel, settings: ContextSettings) -> None:
        """Allocate the context.

        Raises ModelError if the library refuses, or cannot roll back the family's states.
        """
        self.settings = settings
        self.model, self.binding = model, model.binding
        _check_room(self.binding)
        self.binding.errors.clear()
        with interrupts_after():
            pointer = self.binding.context(model.pointer, settings)
            if pointer:
                model.open.add()
                self._drop = finalize(self, model.open.drop_context, pointer)
        if not pointer:
            raise ModelError(
                f"{self.binding.name} cannot create a context of {settings.slots} tokens for "
                f"{model.path.name}: {self.binding.errors.reason()}; reduce cache_tokens"
            )
        self._pointer = pointer
        if settings.rollback and self.binding.rollback(pointer) < settings.rollback:
            self.close()
            raise ModelError(
                f"{model.path} has recurrent layers of a family whose states "
                f"{self.binding.name} cannot roll back; use a model of another family"
            )
        self._batch = _Batch(self.binding.api.llama_batch, settings.rows)
        self.sequences = [NativeSequence(self, number) for number in range(settings.sequences)]

    def decode(self, work: Sequence[Rows]) -> list[Logits]:
        """Run rows of different sequences in one pass.

        If there are several sequences, all must have the same number of rows, and consecutive
        sequence numbers: the library would split any other pass.

        Returns:
            Per sequence, [outputs, vocab] float32: a view of the context's memory, valid until its
            next pass.

        Raises:
            ModelError: the library refused the pass; the positions are unchanged, or with recurrent
                layers lost.
        """
        library = self.binding.library
        for sequence, *_ in work:
            sequence.drop_truncated()
        batch = self._batch.filled(work)
        code = library.llama_decode(ctypes.c_void_p(self._pointer), batch)
        if code:
            for sequence, *_ in work:
                sequence.drop_from(0 if self.settings.rollback else sequence.length)
            raise ModelError(
                f"{self.binding.name} failed in a pass of {batch.n_tokens} rows with code {code}: "
                f"{self.binding.errors.reason()}; try a shorter prompt"
            )
        for sequence, tokens, _ in work:
            sequence.ran(len(tokens))
        if self.settings.taps:
            self._read_taps(work)
        counts = [outputs.stop - outputs.start for _, _, outputs in work]
        shape = (sum(counts), self.model.vocab_size)
        if not shape[0]:
            return [np.empty((0, self.model.vocab_size), np.float32) for _ in work]
        address = library.llama_get_logits(ctypes.c_void_p(self._pointer))
        logits = np.ctypeslib.as_array(ctypes.cast(address, _FLOATS), shape)
        return [logits] if len(work) == 1 else np.split(logits, np.cumsum(counts)[:-1])

    def _read_taps(self, work: Sequence[Rows]) -> None:
        """Copy the hidden states of a pass's rows to their sequences."""
        lengths = [len(tokens) for _, tokens, _ in work]
        shape = sum(lengths), self.binding.width(self.model.pointer)
        for tap in self.settings.taps:
            rows = self.binding.tapped(self._pointer, tap, shape)
            parts = np.split(rows, np.cumsum(lengths)[:-1])
            for (sequence, *_), part in zip(work, parts, strict=True):
                sequence.taps[tap_name(tap)] = part.copy()

    def close(self) -> None:
        self._drop()

    @property
    def pointer(self) -> int:
        if not self._drop.alive:
            raise ValueError("the context is closed")
        return self._pointer


class NativeSequence:
    """One sequence of a context.

    Positions are dropped when the sequence is next used, in one operation: recurrent layers keep
    only the states after the last rows of a pass, and can return to one of them only once. The
    library does not report that a state is missing; it would use an older one (`can_truncate`).
    """

    def __init__(self, context: NativeContext, number: int) -> None:
        self.context, self.number = context, number
        self._binding = context.binding
        self.length = 0
        """Positions of the sequence; the context may have more until the next use."""
        self._held = 0
        self._min_length = 0
        """Minimum positions that can be kept; 0 is always possible."""
        self.taps: dict[str, Logits] = {}
        """Hidden states of its rows in the last pass, [rows, d]; see `ContextSettings.taps`."""

    @property
    def slots(self) -> int:
        return self.context.settings.slots

    def decode(self, tokens: Sequence[int], outputs: slice) -> Logits:
        """Run `tokens` in their own pass; see `NativeContext.decode`."""
        return self.context.decode([Rows(self, tokens, outputs)])[0]

    def embed(self, tokens: Sequence[int]) -> Logits:
        """Run `tokens`; return a copy of their rows after the last norm, [tokens, d] float32."""
        api, pointer = self._binding.api, ctypes.c_void_p(self.context.pointer)
        api.llama_set_embeddings(pointer, True)
        try:
            self.decode(tokens, slice(0, len(tokens)))  # logits are computed but not read
            shape = (len(tokens), self._binding.width(self.context.model.pointer))
            rows = np.ctypeslib.as_array(
                ctypes.cast(api.llama_get_embeddings(pointer), _FLOATS), shape
            )
            return rows.copy()
        finally:
            api.llama_set_embeddings(pointer, False)

    def can_truncate(self, length: int) -> bool:
        """Return whether the sequence can be cut to its first `length` positions."""
        return length == 0 or self._min_length <= length <= self.length

    def truncate(self, length: int) -> None:
        """Drop the positions starting at `length`; requires `can_truncate`."""
        assert self.can_truncate(length), f"{self.length} positions cannot become {length}"
        self.length = length

    def state(self, flags: int = 0) -> State:
        """Copy the sequence's keys and values, and recurrent state.

        With `PARTIAL_STATE`, copy only the recurrent state.
        """
        self.drop_truncated()
        state = self._binding.read_state(self.context.pointer, self.number, flags)
        if not state.size:
            raise ModelError(f"{self._binding.name} cannot copy a sequence's keys and values")
        return state

    def restore(self, state: State, length: int, recurrent: State | None = None) -> None:
        """Replace the sequence with the first `length` positions of a state.

        Args:
            state: the state; with recurrent layers, of at least `length` positions.
            length: see above.
            recurrent: recurrent state after `length` positions, needed if `state` has more
                positions.
        """
        self.drop_truncated()
        try:
            self._write(state)
        except ModelError:
            self.drop_from(0)  # part of it may be in the context
            raise
        if recurrent is not None:
            self._write(recurrent, PARTIAL_STATE)
        self.drop_from(length)

    def restore_recurrent(self, state: State, length: int) -> None:
        """Go back to `length` positions; `state` is the recurrent state there."""
        self._write(state, PARTIAL_STATE)
        self.drop_from(length)

    def drop_truncated(self) -> None:
        """Drop the library's positions that are not in the sequence."""
        if self._held != self.length:
            self.drop_from(self.length)

    def drop_from(self, length: int) -> None:
        """Drop the library's positions starting at `length`. Raises ModelError if that fails."""
        if not self._binding.truncate(self.context.pointer, self.number, length):
            name = self.context.model.path.name
            raise ModelError(f"{self._binding.name} cannot drop tokens of {name}")
        self._count(length)

    def ran(self, rows: int) -> None:
        start = self.length
        self._count(start + rows)
        if rollback := self.context.settings.rollback:
            self._min_length = max(start + 1, self._held - rollback)

    def _write(self, state: State, flags: int = 0) -> None:
        if not self._binding.write_state(self.context.pointer, self.number, state, flags):
            raise ModelError(
                f"{self._binding.name} cannot load {state.size} bytes of keys and values into a "
                f"context of {self.slots} tokens"
            )

    def _count(self, length: int) -> None:
        self.length = self._held = length
        self._min_length = length if self.context.settings.rollback else 0


def _check_room(binding: Binding) -> None:
    """Raise ModelError if no more models and contexts may be opened."""
    if binding.is_full:
        gc.collect()  # break reference cycles that keep contexts alive
    if binding.is_full:
        raise ModelError(
            f"{binding.open} models and contexts of {binding.name} are open in this process, the "
            "maximum; close models that are not used"
        )
