"""The binding of ik_llama.cpp, by the package ik-llama-cpp-python.

Its structs come from the package, whose wheel holds the library that they fit; functions that the
package does not declare are declared here. `IK_LLAMA_CPP_LIB_PATH` names a library of one's own,
built from the same version. Its API is llama.cpp's of 2025: `llama_kv_cache_seq_rm`.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from math import gcd
from pathlib import Path
from typing import Any

from paceline.engines.llamacpp.binding import Binding, ContextSettings, State
from paceline.engines.llamacpp.heads import Heads
from paceline.engines.llamacpp.log import ErrorLog

_PADDED_KEYS, _STEP, _RUN = 256, 128, 32
"""Keys of a call, of a step of softmax, and of a piece are multiples of these."""

_VALUE_BYTES = 256
"""Most bytes of a metadata value that is read."""

_VOID, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_kv_cache_seq_rm": (ctypes.c_bool, [_VOID, _INT, _INT, _INT]),
    "llama_model_has_recurrent": (ctypes.c_bool, [_VOID]),
    "llama_model_meta_val_str": (_INT, [_VOID, ctypes.c_char_p, ctypes.c_char_p, _SIZE]),
    "llama_get_logits": (_VOID, [_VOID]),
    "llama_state_seq_get_size": (_SIZE, [_VOID, _INT, ctypes.c_uint32]),
    "llama_state_seq_get_data": (_SIZE, [_VOID, _VOID, _SIZE, _INT, ctypes.c_uint32]),
    "llama_state_seq_set_data": (_SIZE, [_VOID, _VOID, _SIZE, _INT, ctypes.c_uint32]),
}


@contextlib.contextmanager
def _short_spins() -> Iterator[None]:
    """Load the library's OpenMP with a short wait before a thread sleeps.

    A thread that waits for another one spins, billions of times by default. Where another program
    uses the processor, the one that is waited for does not run meanwhile: with a load of 11 on two
    cores a call of 10 ms took up to 2.8 s; with 1,000 spins at most 33 ms (2026-11-25).
    """
    name = "GOMP_SPINCOUNT"
    ours = name not in os.environ
    os.environ.setdefault(name, "1000")
    try:
        yield
    finally:
        if ours:
            del os.environ[name]


class IkLlama(Binding):
    """ik_llama.cpp; see the top of this file."""

    name = "ik_llama.cpp"

    def __init__(self) -> None:
        """Load the library. Raises ImportError or OSError if it is not installed or not loadable.

        Raises AttributeError for a library without a function that is called.
        """
        from importlib.metadata import version

        with _short_spins():
            from ik_llama_cpp import _ctypes_api as api
        self._api = api
        self.library = api._lib
        self.path = Path(self.library._name)
        self.version = version("ik-llama-cpp-python")
        for function, (result, arguments) in _FUNCTIONS.items():
            declared = getattr(self.library, function)
            declared.restype, declared.argtypes = result, arguments
        self._log = ErrorLog(self.library)

    def load(self, path: Path) -> int | None:
        """See `Binding.load`."""
        self._log.clear()
        params = self._api.llama_model_default_params()
        model: int | None = self._api.llama_model_load_from_file(str(path).encode(), params)
        return model

    def context(self, model: int, settings: ContextSettings) -> int | None:
        """See `Binding.context`."""
        self._log.clear()
        params = self._api.llama_context_default_params()
        params.n_ctx = settings.slots
        params.n_batch = params.n_ubatch = settings.rows
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn = True
        pointer: int | None = self._api.llama_init_from_model(model, params)
        return pointer

    def free_model(self, model: int) -> None:
        """See `Binding.free_model`."""
        self._api.llama_free_model(model)

    def vocab_size(self, model: int) -> int:
        """See `Binding.vocab_size`."""
        return int(self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(model)))

    def is_recurrent(self, model: int) -> bool:
        """See `Binding.is_recurrent`."""
        return bool(self.library.llama_model_has_recurrent(model))

    def metadata(self, model: int, key: str) -> str | None:
        """See `Binding.metadata`."""
        value = ctypes.create_string_buffer(_VALUE_BYTES)
        length = self.library.llama_model_meta_val_str(model, key.encode(), value, _VALUE_BYTES)
        return value.value.decode(errors="replace") if length >= 0 else None

    def batch_type(self) -> type[ctypes.Structure]:
        """See `Binding.batch_type`."""
        struct: type[ctypes.Structure] = self._api.llama_batch
        return struct

    def truncate(self, context: int, length: int) -> bool:
        """See `Binding.truncate`."""
        return bool(self.library.llama_kv_cache_seq_rm(context, 0, length, -1))

    def state_size(self, context: int) -> int:
        """See `Binding.state_size`."""
        return int(self.library.llama_state_seq_get_size(context, 0, 0))

    def read_state(self, context: int, state: State) -> int:
        """See `Binding.read_state`."""
        data = state.ctypes.data
        return int(self.library.llama_state_seq_get_data(context, data, state.size, 0, 0))

    def write_state(self, context: int, state: State) -> int:
        """See `Binding.write_state`."""
        data = state.ctypes.data
        return int(self.library.llama_state_seq_set_data(context, data, state.size, 0, 0))

    def may_be_single(self, keys: int, heads: Heads, threads: int) -> bool:
        """See `Binding.may_be_single`; `iqk_flash_attn_noalibi` in iqk_flash_attn.cpp.

        With one row, and several heads of queries for one of keys, the keys of all heads are
        divided among the threads, in pieces. Sums have the usual order if a head is one piece:

            3 heads, 2 threads, 512 keys   3 * 512 / 2 = 768 keys a thread: a head is one piece
            3 heads, 2 threads, 288 keys   27 runs of 32 for 2 threads: pieces of 128, two cuts

        Keys are padded to 256; masked ones at the end are dropped where they are a quarter or more.
        And softmax goes on in steps of 128 keys, or of 64 or 32 if their number needs that.
        """
        if heads.queries == 1:
            return True
        padded = -(-(keys + 1) // _PADDED_KEYS) * _PADDED_KEYS
        seen = -(-(keys + 1) // _RUN) * _RUN
        if padded > _PADDED_KEYS and seen <= 3 * padded // 4:
            padded = seen
        if padded % _STEP:
            return False
        if heads.keys == 1:
            return threads == 1
        shared = gcd(heads.keys, threads)
        runs, workers = heads.keys // shared * padded // _RUN, threads // shared
        return runs % workers == 0 and heads.keys // threads >= 1

    def last_errors(self) -> str:
        """See `Binding.last_errors`."""
        return self._log.line()
