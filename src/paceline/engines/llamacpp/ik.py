"""The binding of ik_llama.cpp, from the package ik-llama-cpp-python.

Its structs come from the package, whose wheel contains the matching library; functions that the
package does not declare are declared here. `IK_LLAMA_CPP_LIB_PATH` selects a custom library,
built from the same version. Its API is that of llama.cpp in 2025: `llama_kv_cache_seq_rm`.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.decoding.types import Logits
from paceline.engines.llamacpp.binding import Binding, ContextSettings
from paceline.engines.llamacpp.llama_h import TYPES
from paceline.engines.llamacpp.weights import check_kinds, kind_of, window_of
from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile, short

COMPARED = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
"""Weight types that were compared with their values; others are refused."""

FAMILIES = (
    *("gemma", "gemma3", "glm4", "glm4moe", "gpt-oss", "llama", "phi3", "qwen2", "qwen3"),
    *("qwen3moe", "smollm3"),
)
"""Families that were compared. minicpm and mistral3 differ (KL 4.0 and 0.4)."""

_MIN_WINDOW = 128
"""Minimum attention window: a row whose first 64 keys or more are all masked ends the process."""

_SCALINGS = (None, "none", "linear", "yarn")
"""Types of scaled positions; others end the process."""

_IGNORED = "rope_freqs.weight"
"""Position factors, as in Llama 3.1: ignored (KL 1.4). Those of LongRoPE are used."""

_UNSCALED = {"phi3.rope.scaling.type": "none"}
"""The library ends the process at an unknown type, such as Phi's longrope. It does not need the
type: LongRoPE is a tensor of factors, and the file's attn_factor."""

PACKED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL")
"""Types with a packed format (iqk_quantize.cpp, `get_repack_info`). A build with bf16
instructions packs F16 into bf16, which is less precise: files with F16 are not packed."""

_EXPERTS = "_exps.weight"

_VOID, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_kv_cache_seq_rm": (ctypes.c_bool, [_VOID, _INT, _INT, _INT]),
    "llama_model_has_recurrent": (ctypes.c_bool, [_VOID]),
    "llama_model_meta_val_str": (_INT, [_VOID, ctypes.c_char_p, ctypes.c_char_p, _SIZE]),
    "llama_get_logits": (_VOID, [_VOID]),
    "llama_model_quantize": (ctypes.c_uint32, [ctypes.c_char_p, ctypes.c_char_p, _VOID]),
    "llama_state_seq_get_size": (_SIZE, [_VOID, _INT, ctypes.c_uint32]),
    "llama_state_seq_get_data": (_SIZE, [_VOID, _VOID, _SIZE, _INT, ctypes.c_uint32]),
    "llama_state_seq_set_data": (_SIZE, [_VOID, _VOID, _SIZE, _INT, ctypes.c_uint32]),
}


class _Quantization(ctypes.Structure):
    """`llama_model_quantize_params` of version 0.1.5, which the package does not declare."""

    _fields_ = (
        ("nthread", _INT),
        ("ftype", _INT),
        ("types", _INT * 11),  # per kind of tensor; the number of types means none
        ("allow_requantize", ctypes.c_bool),
        ("quantize_output_tensor", ctypes.c_bool),
        ("only_copy", ctypes.c_bool),
        ("pure", ctypes.c_bool),
        ("keep_split", ctypes.c_bool),
        ("ignore_imatrix_rules", ctypes.c_bool),
        ("only_repack", ctypes.c_bool),
        ("dry_run", ctypes.c_bool),
        ("partial_requant", ctypes.c_bool),
        ("pointers", _VOID * 5),
    )

    @property
    def is_understood(self) -> bool:
        flags = [getattr(self, name) for name, kind in self._fields_ if kind is ctypes.c_bool]
        return flags == [False, True] + [False] * 7 and len(set(self.types)) == 1


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, _VOID, ctypes.c_bool, _VOID)


class _TapReader:
    """Copies hidden states while a context computes; called for each tensor, by name."""

    def __init__(self, library: ctypes.CDLL, taps: Sequence[int]) -> None:
        self.rows: dict[int, Logits] = {}
        """Layer -> its output in the last pass, flat."""
        self.callback = _CALLBACK(self._read)
        self._by_name = {f"l_out-{tap}".encode(): tap for tap in taps}
        self._name, self._bytes = library.ggml_get_name, library.ggml_nbytes
        self._name.restype, self._name.argtypes = ctypes.c_char_p, [_VOID]
        self._bytes.restype, self._bytes.argtypes = _SIZE, [_VOID]
        self._get = library.ggml_backend_tensor_get
        self._get.restype, self._get.argtypes = None, [_VOID, _VOID, _SIZE, _SIZE]

    def _read(self, tensor: int, is_asked: bool, _user: int) -> bool:
        tap = self._by_name.get(self._name(tensor))
        if tap is not None and not is_asked:
            rows = self.rows[tap] = np.empty(self._bytes(tensor) // 4, np.float32)
            self._get(tensor, rows.ctypes.data, 0, rows.nbytes)
        return tap is not None or not is_asked


class IkLlama(Binding):
    name = "ik_llama.cpp"
    cache = "keys and values in f16"
    replaced = _UNSCALED
    # In a layer with a window, the library reads the last `ceil((256 + window) / 256) * 256` keys,
    # counted from the next multiple of 256. A window of 512 lacks keys if a pass crosses one:
    #     rows 1000 to 1023    keys 256 to 1023: 489 and later are seen
    #     rows 1000 to 1029    keys 512 to 1279: the first row does not see 489 to 511
    # Row 1023 may be padded: it sees keys 512 and later.
    window_span = 256
    # ggml has 64 arenas per process (GGML_MAX_CONTEXTS); a model takes two, a context two, and a
    # pass a few. With one model, the 32nd context caused a segmentation fault.
    max_open = 28

    def __init__(self) -> None:
        """Load the library. Raises ImportError or OSError if it is missing or cannot be loaded.

        Raises AttributeError if the library lacks a function that is used.
        """
        from ik_llama_cpp import _ctypes_api as api

        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(api._lib, name)
            function.restype, function.argtypes = result, arguments
        super().__init__(api, [name for name in _FUNCTIONS if name.startswith("llama_state_seq")])
        self._readers: dict[int, _TapReader] = {}
        """By context; a freed context's entry stays until another has its address."""

    def check(self, name: str, content: GgufFile, *, quantized: bool = False) -> None:
        family, scaling = content.family, content.family_value("rope.scaling.type")
        window = window_of(self.name, name, content)
        factors = [tensor.name for tensor in content.tensors if tensor.name == _IGNORED]
        fault = None
        if family not in FAMILIES:
            fault = f"the family {short(repr(family))}; expected one of {', '.join(FAMILIES)}"
        elif window is not None and quantized:
            fault = "an attention window and keys in q8_0; remove --kv-cache-type, or use llama.cpp"
        elif window is not None and window < _MIN_WINDOW:
            fault = f"an attention window of {window}; expected {_MIN_WINDOW} or more"
        elif factors or scaling not in (*_SCALINGS, "longrope" if family == "phi3" else None):
            fault = f"positions scaled by {short(factors or scaling)}; expected linear or yarn"
        if fault:
            raise ModelError(
                f"{name} has {fault} ({self.name} gives wrong results or crashes otherwise)"
            )
        check_kinds(self.name, name, content, COMPARED)

    def packs(self, content: GgufFile) -> bool:
        """See `Binding.packs`. Experts are excluded: their products were not compared packed."""
        types = {kind_of(tensor) for tensor in content.tensors}
        experts = any(tensor.name.endswith(_EXPERTS) for tensor in content.tensors)
        return not experts and "F16" not in types and not types.isdisjoint(PACKED)

    def pack(self, source: Path, target: Path) -> int:
        defaults = self.library.llama_model_quantize_default_params
        defaults.restype, defaults.argtypes = _Quantization, []
        params: _Quantization = defaults()
        if not params.is_understood:
            return 1
        params.only_repack = True
        code: int = self.library.llama_model_quantize(
            bytes(source), bytes(target), ctypes.byref(params)
        )
        return code

    def context(self, model: int, settings: ContextSettings) -> int | None:
        params = self.api.llama_context_default_params()
        params.n_ctx = settings.slots
        params.n_batch = params.n_ubatch = settings.rows
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn = True
        if settings.quantized:
            params.type_k = params.type_v = TYPES["q8_0"]
        reader = _TapReader(self.library, settings.taps) if settings.taps else None
        if reader is not None:
            params.cb_eval = ctypes.cast(reader.callback, type(params.cb_eval))
        pointer: int | None = self.api.llama_init_from_model(model, params)
        if pointer and reader is not None:
            self._readers[pointer] = reader
        return pointer

    def has_taps(self, taps: tuple[int, ...], layers: int) -> bool:
        """See `Binding.has_taps`: the last layer runs only the rows with logits."""
        return max(taps, default=-1) < layers - 1

    def tapped(self, context: int, tap: int, shape: tuple[int, int]) -> Logits:
        return self._readers[context].rows[tap].reshape(shape)

    def free_model(self, model: int) -> None:
        self.api.llama_free_model(model)

    def is_recurrent(self, model: int) -> bool:
        return bool(self.library.llama_model_has_recurrent(model))

    def truncate(self, context: int, sequence: int, length: int) -> bool:
        return bool(self.library.llama_kv_cache_seq_rm(context, sequence, length, -1))
