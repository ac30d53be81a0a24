"""The interface of a llama.cpp library: its structs, function names and limits.

Independent of row rules and of paceline's sequences. A binding has a library's structs, its names
and the list of files that it computes correctly; models and contexts are the same (`native.py`).
"""

import contextlib
import ctypes
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Logits
from paceline.storage.gguf_file import GgufFile

MIN_CONTEXT = 256
"""Contexts have a multiple of this many slots: attention pads keys to it."""

MAX_OUTPUTS = 16
"""Maximum rows of a sequence per pass that get logits: a context has memory for them."""

_VALUE_BYTES = 256
"""Maximum bytes of a metadata value."""

_GROUP = 32
"""Numbers per group of Q8_0."""

_HEAD_SIZES = ("key_length", "key_length_swa", "key_length_mla")
"""Head sizes of keys in a file's metadata, if present."""

_ORIGINAL_LENGTH = "rope.scaling.original_context_length"

_NUMBER, _TEXT = 0, 3
"""Types of replaced metadata: `llama_model_kv_override_type` in llama.h."""

_MAX_LENGTH = 2**31 - 1
"""Larger than the number of slots of any context."""

PARTIAL_STATE = 1
"""`LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`: the part of a recurrent state that no position can cut."""

_ERROR, _CONTINUED = 4, 5
"""`ggml_log_level` of ik_llama.cpp and llama.cpp; a continued line has the last one's level."""

_LINES = 3
"""Maximum log lines that are stored."""

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

State = npt.NDArray[np.uint8]
"""A sequence's keys and values as the library writes them, in order of position."""


class Device(NamedTuple):
    name: str
    """The library's name for it, such as `CUDA0`."""
    about: str
    free: int
    """Bytes of its memory."""
    pointer: int

    @property
    def is_software(self) -> bool:
        """True if the CPU computes it: Mesa's device for machines without a GPU."""
        return self.about.startswith("llvmpipe")

    def __str__(self) -> str:
        return f"{self.name} ({self.about}, {self.free >> 20} MiB free)"


class Offload(NamedTuple):
    """The last layers of a model, which run on a device together with their KV."""

    device: Device
    layers: int
    """Number of layers; the output counts as one."""
    is_whole: bool
    slots: int
    """Slots of a KV cache that fit next to the layers."""

    def __str__(self) -> str:
        part = "all" if self.is_whole else f"the output and {self.layers - 1}"
        return f"{part} layers on {self.device.name} ({self.device.about})"


class ContextSettings(NamedTuple):
    slots: int
    """Positions of a sequence; a multiple of `MIN_CONTEXT`."""
    rows: int
    threads: int
    rollback: int = 0
    """With recurrent layers: rows of the last pass that can be dropped, at least one."""
    sequences: int = 1
    """Sequences, each with its own keys and values; see `Binding.shares_calls`."""
    outputs: int = MAX_OUTPUTS
    """Maximum rows of a pass that get logits."""
    taps: tuple[int, ...] = ()
    """Layers whose hidden states every pass outputs; see `EngineSettings.taps`."""
    quantized: bool = False
    """True if keys and values are in Q8_0."""
    offloaded: bool = False
    """True if layers run on a device, with their keys and values."""


class Heads(NamedTuple):
    """Head counts that are equal in all layers."""

    keys: int
    """Heads of keys and values."""
    queries: int
    """Query heads per key head."""


class Binding(ABC):
    """A loaded library: its structs, and the names of its functions."""

    name: str
    version: str
    """Version of the package; for a custom library, also its identity. Set by `load`."""
    cache: str
    """Types of keys and values, for display."""

    embeds = False
    """True if contexts can return rows after the last norm."""
    rolls_back = False
    """True if recurrent states can be rolled back, and copied without keys and values."""
    replaced: Mapping[str, int | str] = MappingProxyType({})
    """Metadata values that replace those of every file."""
    window_span = 0
    """With an attention window, no pass may cross a multiple of this position; 0: any may."""
    max_open = 256
    """Maximum models and contexts open at once: at its own limit the library ends the
    process."""
    open = 0

    def __init__(self, api: Any, state_functions: Sequence[str]) -> None:
        """Receive the library's log.

        Args:
            api: the package's module with the library, its structs and declared functions.
            state_functions: names of the functions that size, read and write a sequence's state.
        """
        self.api = api
        self.library: ctypes.CDLL = api._lib
        self._state_functions = [getattr(self.library, name) for name in state_functions]
        self.errors = ErrorLog(self.library)

    @abstractmethod
    def check(self, name: str, content: GgufFile, *, quantized: bool = False) -> None:
        """Raise ModelError for a file that the library, by its source, computes incorrectly.

        Files with a weight type that was not compared with other implementations are also refused.
        `name` is the file's name, for the message; `quantized` is that of `ContextSettings`.
        """

    @property
    def is_full(self) -> bool:
        """True if no more models or contexts may be opened."""
        return self.open >= self.max_open

    def shares_calls(self, content: GgufFile) -> bool:
        """Return whether a context can hold several sequences, with their rows in one pass."""
        return False

    def packs(self, content: GgufFile) -> bool:
        """Return whether the library computes a file faster in a packed copy; see `packed.py`."""
        return False

    def devices(self) -> list[Device]:
        """Return the library's devices other than the CPU, with their currently free memory."""
        return []

    def load(self, path: Path, offload: Offload | None = None, mtp: bool = False) -> int | None:
        """Map a GGUF file and return a pointer to the model, or None if it cannot be mapped.

        Without `offload` the CPU runs it; `mtp` also maps its MTP layers.
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
        return self.api.llama_model_default_params()

    @abstractmethod
    def context(self, model: int, settings: ContextSettings) -> int | None:
        """Return a pointer to a new context, or None."""

    def has_taps(self, taps: tuple[int, ...], layers: int) -> bool:
        """Return whether passes of a model with `layers` layers output the hidden states `taps`."""
        return not taps

    def tapped(self, context: int, tap: int, shape: tuple[int, int]) -> Logits:
        """Return a view of a layer's hidden states, the [rows, d] of the last pass."""
        raise NotImplementedError

    @abstractmethod
    def free_model(self, model: int) -> None:
        """Unmap a model."""

    @abstractmethod
    def is_recurrent(self, model: int) -> bool:
        """Return whether some layers have a state instead of keys and values."""

    @abstractmethod
    def truncate(self, context: int, sequence: int, length: int) -> bool:
        """Drop a sequence's positions starting at `length`; False: the library cannot."""

    def state_size(self, context: int, sequence: int, flags: int = 0) -> int:
        return int(self._state_functions[0](context, sequence, flags))

    def read_state(self, context: int, sequence: int, flags: int = 0) -> State:
        """Copy the state, whose first positions can be continued; empty if it failed."""
        state = np.empty(self.state_size(context, sequence, flags), np.uint8)
        read = self._state_functions[1]
        return state[: read(context, state.ctypes.data, state.size, sequence, flags)]

    def write_state(self, context: int, sequence: int, state: State, flags: int = 0) -> int:
        """Load a state into a context; return the bytes read, or 0 if it does not fit."""
        write = self._state_functions[2]
        return int(write(context, state.ctypes.data, state.size, sequence, flags))

    def rollback(self, context: int) -> int:
        """Return the rows that recurrent layers can drop; 0 for unsupported families."""
        return 0

    def has_window(self, model: int) -> bool:
        """Return whether some layers see only a window of positions."""
        return self.family_value(model, "attention.sliding_window") not in ("", "0")

    def has_whole_groups(self, model: int) -> bool:
        """Return whether keys can be in Q8_0: its groups of numbers must not cross heads."""
        sizes = [self.family_value(model, f"attention.{name}") for name in _HEAD_SIZES]
        numbers = [int(size) for size in sizes if size.isdigit()]
        heads = self.family_value(model, "attention.head_count")
        if not numbers and heads.isdigit():
            numbers = [self.width(model) // int(heads)]
        return bool(numbers) and not any(number % _GROUP for number in numbers)

    def heads(self, model: int) -> Heads | None:
        """Return a model's heads, or None if layers differ, with lists as values."""
        queries = self.family_value(model, "attention.head_count")
        keys = self.family_value(model, "attention.head_count_kv") or queries
        if not (queries.isdigit() and keys.isdigit()):
            return None
        groups, rest = divmod(int(queries), max(int(keys), 1))
        return Heads(int(keys), groups) if int(keys) and not rest else None

    def vocab_size(self, model: int) -> int:
        return int(self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(model)))

    def width(self, model: int) -> int:
        return int(self.api.llama_model_n_embd(model))

    def metadata(self, model: int, key: str) -> str | None:
        """Return a metadata value of the file; None if it is missing, or a list."""
        value = ctypes.create_string_buffer(_VALUE_BYTES)
        length = self.library.llama_model_meta_val_str(model, key.encode(), value, _VALUE_BYTES)
        return value.value.decode(errors="replace") if length >= 0 else None

    def family_value(self, model: int, key: str) -> str:
        """Return a value under the name of the model's family; empty if there is none."""
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
        """Return the original length that keeps a model's LongRoPE factors constant.

        The library uses the factors for long texts if a context has more slots than that length.
        But contexts grow with their sequence, whose keys must not be rotated again:

            context of 131,072, original 4,096   long factors always: 1, which every context exceeds
            context of 4,096, original 4,096     short ones always: a number that none exceeds

        Returns None without an original length, or if it affects the frequencies (YaRN).
        """
        original, context, kind = (
            self.family_value(model, key)
            for key in (_ORIGINAL_LENGTH, "context_length", "rope.scaling.type")
        )
        if kind == "yarn" or not (original.isdigit() and context.isdigit()):
            return None
        return 1 if int(context) > int(original) else _MAX_LENGTH


class ErrorLog:
    """Stores the last error lines of a library."""

    _callbacks: ClassVar[list[Any]] = []
    """Never freed: libraries keep pointers to them, also after a binding was rejected."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._lines: list[str] = []
        self._error = False
        self._callbacks.append(_CALLBACK(self._receive))
        library.llama_log_set.argtypes = [_CALLBACK, ctypes.c_void_p]
        library.llama_log_set.restype = None
        library.llama_log_set(self._callbacks[-1], None)

    def clear(self) -> None:
        self._lines = []

    def reason(self) -> str:
        """Return the lines since `clear` as the end of a message."""
        return "; ".join(self._lines) or "no reason given"

    def _receive(self, level: int, text: bytes | None, _: object) -> None:
        if level != _CONTINUED:
            self._error = level == _ERROR
        line = (text or b"").decode(errors="replace").strip()
        if self._error and line:
            self._lines = [*self._lines, line][-_LINES:]


@contextlib.contextmanager
def interrupts_after() -> Iterator[None]:
    """Delay Ctrl-C until after the block, for library calls that write log lines.

    An exception in a callback from C is printed and lost, even a KeyboardInterrupt.
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
