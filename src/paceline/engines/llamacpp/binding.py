"""What the engine needs of a library of llama.cpp's family: its structs, names and limits.

Independent of rules for rows and of paceline's sequences. A binding has a library's structs, its
names and which files it computes right; models and contexts are alike in the family (`native.py`).
"""

import contextlib
import ctypes
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Logits
from paceline.storage.gguf_file import GgufFile

LEAST_CONTEXT = 256
"""Slots that contexts are multiples of: attention pads keys to it."""

MOST_OUTPUTS = 16
"""Most rows of a sequence in a call that get logits: a context has memory for them."""

_VALUE_BYTES = 256
"""Most bytes of a metadata value that is read."""

_GROUP = 32
"""Numbers of a group of Q8_0."""

_HEAD_SIZES = ("key_length", "key_length_swa", "key_length_mla")
"""Sizes of a head of keys in a file's metadata, those that it has."""

_ORIGINAL_LENGTH = "rope.scaling.original_context_length"

_NUMBER, _TEXT = 0, 3
"""Kinds of replaced metadata: `llama_model_kv_override_type` in llama.h."""

_MOST_LENGTH = 2**31 - 1
"""No context has as many slots."""

PARTIAL_STATE = 1
"""`LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`: what cannot be cut at a position, of recurrent layers."""

_ERROR, _CONTINUED = 4, 5
"""`ggml_log_level` of ik_llama.cpp and llama.cpp; a continued line has the last one's level."""

_LINES = 3
"""Most lines that are kept."""

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

State = npt.NDArray[np.uint8]
"""A sequence's keys and values as the library writes them, in the order of positions."""


class Device(NamedTuple):
    name: str
    """As the library has it, such as `CUDA0`."""
    about: str
    free: int
    """Bytes of its memory."""
    pointer: int

    @property
    def is_software(self) -> bool:
        """Whether the processor computes it: Mesa's device for machines without a GPU."""
        return self.about.startswith("llvmpipe")

    def __str__(self) -> str:
        return f"{self.name} ({self.about}, {self.free >> 20} MiB free)"


class Offload(NamedTuple):
    """The last layers of a model, which run on a device with their keys and values."""

    device: Device
    layers: int
    """Their number; the output counts as one."""
    is_whole: bool
    slots: int
    """Slots of a KV cache that fit beside them."""

    def __str__(self) -> str:
        part = "all" if self.is_whole else f"the output and {self.layers - 1}"
        return f"{part} layers on {self.device.name} ({self.device.about})"


class ContextSettings(NamedTuple):
    slots: int
    """Positions of a sequence; a multiple of `LEAST_CONTEXT`."""
    rows: int
    threads: int
    rollback: int = 0
    """With recurrent layers: rows of the last call, at least one, that can be dropped."""
    sequences: int = 1
    """Sequences, each with keys and values of its own; see `Binding.shares_calls`."""
    outputs: int = MOST_OUTPUTS
    """Most rows of a call that get logits."""
    taps: tuple[int, ...] = ()
    """Layers whose hidden states every call leaves; see `EngineSettings.taps`."""
    quantized: bool = False
    """Whether keys and values are in Q8_0."""
    offloaded: bool = False
    """Whether layers run on a device, with their keys and values."""


class Heads(NamedTuple):
    """Heads that all layers have alike."""

    keys: int
    """Heads of keys and values."""
    queries: int
    """Heads of queries per head of keys."""


class Binding(ABC):
    """A library that was loaded: its structs, and the names of its functions."""

    name: str
    version: str
    """Version of the package; of a library of one's own, also which one it is. Set by `load`."""
    cache: str
    """Types of keys and values, for display."""

    embeds = False
    """Whether contexts give rows as they are after the last norm."""
    rolls_back = False
    """Whether states of recurrent layers can be rolled back, and copied without keys and values."""
    replaced: Mapping[str, int | str] = MappingProxyType({})
    """Values of metadata with which every file is mapped instead of its own."""
    window_span = 0
    """With a window of attention no call may cross a multiple of so many positions; 0: any may."""
    most_open = 256
    """Models and contexts that may be open at once: beyond its own limit the library ends the
    process."""
    open = 0

    def __init__(self, api: Any, state_functions: Sequence[str]) -> None:
        """Receive the library's log.

        Args:
            api: the package's module with the library, its structs and declared functions.
            state_functions: names of those that size, read and write a sequence's state.
        """
        self.api = api
        self.library: ctypes.CDLL = api._lib
        self._state_functions = [getattr(self.library, name) for name in state_functions]
        self._log = _ErrorLog(self.library)

    @abstractmethod
    def check(self, name: str, content: GgufFile, *, quantized: bool = False) -> None:
        """Raise ModelError for a file that the library does not compute right, by its source.

        Nor is one right of which a type of weights was not compared with other implementations.
        `name` is the file's, for the message; `quantized` as in `ContextSettings`.
        """

    @property
    def is_full(self) -> bool:
        """Whether no more may be opened."""
        return self.open >= self.most_open

    def shares_calls(self, content: GgufFile) -> bool:
        """Whether a context of a file's model can have several sequences, and a call their rows."""
        return False

    def packs(self, content: GgufFile) -> bool:
        """Whether the library computes a file faster in a packed copy; see `packed.py`."""
        return False

    def devices(self) -> list[Device]:
        """The library's devices besides the processor, with what is free of their memory now."""
        return []

    def load(self, path: Path, offload: Offload | None = None, mtp: bool = False) -> int | None:
        """Map a GGUF file and return a pointer to the model, or None if it cannot be mapped.

        Without `offload` the processor runs it; `mtp` maps its MTP layers too.
        """
        params = self.model_params(offload)
        if mtp:
            params.load_mtp = True
        model = self._load(path, self.replaced, params)
        length = self._longrope_length(model) if model else None
        if model is None or length is None:
            return model
        key = f"{self.metadata(model, 'general.architecture')}.{_ORIGINAL_LENGTH}"
        self.free_model(model)
        return self._load(path, {**self.replaced, key: length}, params)

    def model_params(self, offload: Offload | None) -> Any:
        """The library's parameters of a model."""
        return self.api.llama_model_default_params()

    @abstractmethod
    def context(self, model: int, settings: ContextSettings) -> int | None:
        """A pointer to a new context, or None."""

    def has_taps(self, taps: tuple[int, ...], layers: int) -> bool:
        """Whether calls of a model with some layers leave the hidden states after `taps`."""
        return not taps

    def tapped(self, context: int, tap: int, shape: tuple[int, int]) -> Logits:
        """Hidden states after a layer, of the [rows, d] of the last call; a view."""
        raise NotImplementedError

    @abstractmethod
    def free_model(self, model: int) -> None:
        """Unmap a model."""

    @abstractmethod
    def is_recurrent(self, model: int) -> bool:
        """Whether some layers have a state instead of keys and values."""

    @abstractmethod
    def truncate(self, context: int, sequence: int, length: int) -> bool:
        """Drop a sequence's positions from `length` on; False: the library cannot."""

    def state_size(self, context: int, sequence: int, flags: int = 0) -> int:
        """Bytes of a sequence's state."""
        return int(self._state_functions[0](context, sequence, flags))

    def read_state(self, context: int, sequence: int, flags: int = 0) -> State:
        """A copy of the state, of which any first positions can go on; empty: it failed."""
        state = np.empty(self.state_size(context, sequence, flags), np.uint8)
        read = self._state_functions[1]
        return state[: read(context, state.ctypes.data, state.size, sequence, flags)]

    def write_state(self, context: int, sequence: int, state: State, flags: int = 0) -> int:
        """Put a state into a context; returns bytes read, 0 if it does not fit."""
        write = self._state_functions[2]
        return int(write(context, state.ctypes.data, state.size, sequence, flags))

    def rollback(self, context: int) -> int:
        """Rows that a context can drop of recurrent layers; 0 for families without support."""
        return 0

    def has_window(self, model: int) -> bool:
        """Whether some layers see a window of positions."""
        return self.family_value(model, "attention.sliding_window") not in ("", "0")

    def has_whole_groups(self, model: int) -> bool:
        """Whether keys can be in Q8_0: its groups of numbers do not cross heads."""
        sizes = [self.family_value(model, f"attention.{name}") for name in _HEAD_SIZES]
        numbers = [int(size) for size in sizes if size.isdigit()]
        heads = self.family_value(model, "attention.head_count")
        if not numbers and heads.isdigit():
            numbers = [self.width(model) // int(heads)]
        return bool(numbers) and not any(number % _GROUP for number in numbers)

    def heads(self, model: int) -> Heads | None:
        """A model's heads, or None where layers differ: the values are lists."""
        queries = self.family_value(model, "attention.head_count")
        keys = self.family_value(model, "attention.head_count_kv") or queries
        if not (queries.isdigit() and keys.isdigit()):
            return None
        groups, rest = divmod(int(queries), max(int(keys), 1))
        return Heads(int(keys), groups) if int(keys) and not rest else None

    def vocab_size(self, model: int) -> int:
        """Width of a row of logits."""
        return int(self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(model)))

    def width(self, model: int) -> int:
        """Numbers of a row between layers."""
        return int(self.api.llama_model_n_embd(model))

    def metadata(self, model: int, key: str) -> str | None:
        """A single value of the file's metadata; None if there is none, or it is a list."""
        value = ctypes.create_string_buffer(_VALUE_BYTES)
        length = self.library.llama_model_meta_val_str(model, key.encode(), value, _VALUE_BYTES)
        return value.value.decode(errors="replace") if length >= 0 else None

    def family_value(self, model: int, key: str) -> str:
        """A single value under the name of the model's family; empty if there is none."""
        family = self.metadata(model, "general.architecture")
        return self.metadata(model, f"{family}.{key}") or ""

    def _load(self, path: Path, replaced: Mapping[str, int | str], params: Any) -> int | None:
        """Map a file, with some values of its metadata replaced."""
        values = (self.api.llama_model_kv_override * (len(replaced) + 1))()  # the last is empty
        for struct, (key, value) in zip(values, replaced.items(), strict=False):
            struct.key = key.encode()
            if isinstance(value, int):
                struct.tag, struct.value.val_i64 = _NUMBER, value
            else:
                struct.tag, struct.value.val_str = _TEXT, value.encode()
        params.kv_overrides = values
        model: int | None = self.api.llama_model_load_from_file(bytes(path), params)
        return model

    def _longrope_length(self, model: int) -> int | None:
        """The original length that gives a model's LongRoPE the same factors always.

        The library takes the factors for long texts where a context has more slots than that
        length. But contexts grow with their sequence, whose keys must not be rotated anew:

            context of 131,072, original 4,096   long factors always: 1, which every context exceeds
            context of 4,096, original 4,096     short ones always: a number that none exceeds

        None for a model without an original length, or whose frequencies it enters (YaRN).
        """
        original, context, kind = (
            self.family_value(model, key)
            for key in (_ORIGINAL_LENGTH, "context_length", "rope.scaling.type")
        )
        if kind == "yarn" or not (original.isdigit() and context.isdigit()):
            return None
        return 1 if int(context) > int(original) else _MOST_LENGTH

    def last_errors(self) -> str:
        """The library's last lines about errors since `forget_errors`, one line; may be empty."""
        return self._log.line()

    def forget_errors(self) -> None:
        """Begin to collect lines about errors."""
        self._log.clear()


class _ErrorLog:
    """Keeps the last error lines of a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Receive the library's log from now on."""
        self._lines: list[str] = []
        self._error = False
        self._callback = _CALLBACK(self._receive)  # the library keeps a pointer to it
        library.llama_log_set.argtypes = [_CALLBACK, ctypes.c_void_p]
        library.llama_log_set.restype = None
        library.llama_log_set(self._callback, None)

    def clear(self) -> None:
        """Forget earlier lines."""
        self._lines = []

    def line(self) -> str:
        return "; ".join(self._lines)

    def _receive(self, level: int, text: bytes | None, _: object) -> None:
        if level != _CONTINUED:
            self._error = level == _ERROR
        line = (text or b"").decode(errors="replace").strip()
        if self._error and line:
            self._lines = [*self._lines, line][-_LINES:]


@contextlib.contextmanager
def interrupts_after() -> Iterator[None]:
    """Ctrl-C comes after the block, for calls that write lines of the log.

    What a callback from C raises is printed and lost, and with it the KeyboardInterrupt.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
