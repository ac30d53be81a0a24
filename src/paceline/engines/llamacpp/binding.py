"""What the engine needs of a library of llama.cpp's family: a model, and contexts of one sequence.

Independent of row classes and of paceline's sequences. A binding knows a library's structs and
names; everything after that is alike in the family. A context has one sequence: two in a call of
ik_llama.cpp end the process or change bits. Contexts share the model's weights, which are mapped
from the file. Invariant: a failed call raises; the library's own asserts end the process, so only
calls that were tried are made.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Logits
from paceline.engines.llamacpp.heads import Heads, heads_of
from paceline.errors import ModelError

LEAST_CONTEXT = 256
"""Slots that contexts are multiples of: attention pads keys to it."""

_SOME_ROWS = 16
"""Rows of the calls that measure the size of a position."""

State = npt.NDArray[np.uint8]
"""A sequence's keys and values as the library writes them, in the order of positions."""

_FLOATS = ctypes.POINTER(ctypes.c_float)


class ContextSettings(NamedTuple):
    """Settings of a context."""

    slots: int
    """Positions; a multiple of `LEAST_CONTEXT`."""
    rows: int
    """Most rows of a call."""
    threads: int


class Binding(ABC):
    """A library that was loaded: its structs, and the names of its functions."""

    name: str
    version: str
    path: Path
    """The library's file."""
    library: ctypes.CDLL

    @abstractmethod
    def load(self, path: Path) -> int | None:
        """Map a GGUF file; a pointer to the model, or None."""

    @abstractmethod
    def context(self, model: int, settings: ContextSettings) -> int | None:
        """A pointer to a new context with one sequence, or None."""

    @abstractmethod
    def free_model(self, model: int) -> None:
        """Unmap a model."""

    @abstractmethod
    def vocab_size(self, model: int) -> int:
        """Width of a row of logits."""

    @abstractmethod
    def is_recurrent(self, model: int) -> bool:
        """Whether some layers have a state instead of keys and values."""

    @abstractmethod
    def metadata(self, model: int, key: str) -> str | None:
        """A single value of the file's metadata; None if there is none, or it is a list."""

    @abstractmethod
    def batch_type(self) -> type[ctypes.Structure]:
        """The struct `llama_batch`."""

    @abstractmethod
    def truncate(self, context: int, length: int) -> bool:
        """Drop the positions from `length` on; False: the library cannot."""

    @abstractmethod
    def state_size(self, context: int) -> int:
        """Bytes of the sequence's state."""

    @abstractmethod
    def read_state(self, context: int, state: State) -> int:
        """Copy the state out of a context; returns bytes written."""

    @abstractmethod
    def write_state(self, context: int, state: State) -> int:
        """Put a state into a context; returns bytes read, 0 if it does not fit."""

    @abstractmethod
    def may_be_single(self, keys: int, heads: Heads, threads: int) -> bool:
        """Whether a call with one row after `keys` keys adds in the order of calls with several.

        By the library's source; `row_classes.py` measures it where this allows it.
        """

    @abstractmethod
    def last_errors(self) -> str:
        """The library's own last lines about errors, one line; empty if there are none."""


class NativeModel:
    """A mapped GGUF file."""

    def __init__(self, binding: Binding, path: Path) -> None:
        """Map `path`. Raises ModelError, with the library's own words, if it is refused."""
        self.binding = binding
        self.path = path
        pointer = binding.load(path)
        if not pointer:
            raise ModelError(
                f"{binding.name} cannot open {path}: {binding.last_errors() or 'no reason given'}; "
                "get the file again, or use --engine openvino"
            )
        self.pointer: int = pointer
        stat = path.stat()
        self.identity = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        """The file's size, time and number, which tell whether it is the same one."""
        self.vocab_size = binding.vocab_size(pointer)
        self.heads = heads_of(partial(binding.metadata, pointer))
        """Heads of attention, if all layers have the same, without a window."""
        if binding.is_recurrent(pointer):
            binding.free_model(pointer)
            raise ModelError(
                f"{path} has recurrent layers, whose states the engine llamacpp does not roll back "
                "yet; use --engine openvino"
            )

    def slot_bytes(self, threads: int) -> int:
        """Bytes of the keys and values of one position."""
        context = self.context(ContextSettings(LEAST_CONTEXT, _SOME_ROWS, threads))
        sizes = []
        for _ in range(2):
            context.decode([0] * _SOME_ROWS, slice(0, 0))
            sizes.append(self.binding.state_size(context.pointer))
        context.close()
        return (sizes[1] - sizes[0]) // _SOME_ROWS

    def close(self) -> None:
        """Unmap the file."""
        self.binding.free_model(self.pointer)

    def context(self, settings: ContextSettings) -> "NativeContext":
        """A new, empty context. Raises ModelError if there is no memory for it."""
        return NativeContext(self, settings)


class NativeContext:
    """Keys and values of one sequence, and the memory of its calls."""

    def __init__(self, model: NativeModel, settings: ContextSettings) -> None:
        """Allocate the context. Raises ModelError if the library does not."""
        self.settings = settings
        self._model, self._binding = model, model.binding
        pointer = self._binding.context(model.pointer, settings)
        if not pointer:
            reason = self._binding.last_errors() or "no reason given"
            raise ModelError(
                f"{self._binding.name} has no context of {settings.slots} tokens for "
                f"{model.path.name}: {reason}; fewer cache_tokens may help"
            )
        self._pointer: int | None = pointer
        self.length = 0
        """Positions whose keys and values are here."""
        self._batch = _Batch(self._binding.batch_type(), settings.rows)

    def decode(self, tokens: Sequence[int], outputs: slice) -> Logits:
        """Run `tokens` in one call after `length` positions.

        Args:
            tokens: at most `settings.rows` token ids.
            outputs: rows that need logits, with its start and stop.

        Returns:
            [outputs, vocab] float32: a view of the context's memory, valid until its next call.

        Raises:
            ModelError: the library refused the call; the positions are unchanged.
        """
        library = self._binding.library
        batch = self._batch.filled(tokens, self.length, outputs)
        code = library.llama_decode(ctypes.c_void_p(self._pointer), batch)
        if code:
            self.truncate(self.length)
            raise ModelError(
                f"{self._binding.name} failed in a call of {len(tokens)} rows with code {code}: "
                f"{self._binding.last_errors() or 'no reason given'}; a shorter prompt may help"
            )
        self.length += len(tokens)
        shape = (outputs.stop - outputs.start, self._model.vocab_size)
        if not shape[0]:
            return np.empty(shape, np.float32)
        address = library.llama_get_logits(ctypes.c_void_p(self._pointer))
        return np.ctypeslib.as_array(ctypes.cast(address, _FLOATS), shape)

    def truncate(self, length: int) -> None:
        """Drop the positions from `length` on."""
        if not self._binding.truncate(self.pointer, length):
            raise ModelError(f"{self._binding.name} cannot drop tokens of {self._model.path.name}")
        self.length = length

    def state(self) -> State:
        """A copy of the sequence's keys and values."""
        state = np.empty(self._binding.state_size(self.pointer), np.uint8)
        written = self._binding.read_state(self.pointer, state)
        if not written:
            raise ModelError(f"{self._binding.name} cannot copy a sequence's keys and values")
        return state[:written]

    def restore(self, state: State, length: int) -> None:
        """Replace the sequence by the first `length` positions of a state."""
        if not self._binding.write_state(self.pointer, state):
            raise ModelError(
                f"{self._binding.name} cannot put {state.size} bytes of keys and values into a "
                f"context of {self.settings.slots} tokens"
            )
        self.truncate(length)

    def close(self) -> None:
        """Free the memory. Further calls do nothing."""
        if self._pointer is not None:
            self._binding.library.llama_free(ctypes.c_void_p(self._pointer))
            self._pointer = None

    @property
    def pointer(self) -> int:
        """The library's context."""
        if self._pointer is None:
            raise ValueError("the context is closed")
        return self._pointer


class _Batch:
    """The arrays of a `llama_batch`, which stay alive between calls."""

    def __init__(self, struct: type[ctypes.Structure], rows: int) -> None:
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(rows, np.int32)
        self._outputs = np.zeros(rows, np.int8)
        self._sequences = np.ones(rows, np.int32)
        self._sequence = (ctypes.c_int32 * 1)(0)
        pointer = ctypes.POINTER(ctypes.c_int32)
        self._ids = (pointer * rows)(*[ctypes.cast(self._sequence, pointer)] * rows)
        arrays: dict[str, npt.NDArray[Any]] = {
            "token": self._tokens,
            "pos": self._positions,
            "n_seq_id": self._sequences,
            "logits": self._outputs,
        }
        self._struct = struct()
        types: dict[str, Any] = {field[0]: field[1] for field in struct._fields_}
        for name, array in arrays.items():
            setattr(self._struct, name, array.ctypes.data_as(types[name]))
        self._struct.seq_id = ctypes.cast(self._ids, types["seq_id"])

    def filled(self, tokens: Sequence[int], start: int, outputs: slice) -> ctypes.Structure:
        """The batch for `tokens` at positions from `start` on, with logits of rows `outputs`."""
        count = len(tokens)
        self._struct.n_tokens = count
        self._tokens[:count] = tokens
        self._positions[:count] = np.arange(start, start + count)
        self._outputs[:count] = 0
        self._outputs[outputs] = 1
        return self._struct
