"""llama.cpp's C interface in build 11549: structs, function types, and loading the library.

The wheel of xllamacpp contains the library as one shared object, without declarations. Its structs
have no size and no version, so they are declared here, and compared with the library's default
values when it is loaded: an added field moves the values after it. The last field is followed by
padding, which a library with a longer struct may write to.
"""

import ctypes
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.errors import ModelError

_BOOL, _FLOAT, _INT, _INT8 = ctypes.c_bool, ctypes.c_float, ctypes.c_int32, ctypes.c_int8
_LONG, _SIZE, _TEXT, _UINT = ctypes.c_int64, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_uint32
_VOID = ctypes.c_void_p

_ROOM = ("room", ctypes.c_uint64 * 32)

TYPES: Mapping[str, int] = {"f16": 1, "q8_0": 8, "bf16": 30}
"""KV cache types -> their numbers in ggml.h."""

FLASH_ATTENTION = 1
"""`LLAMA_FLASH_ATTN_TYPE_ENABLED`."""

GPUS = (1, 2)
"""`GGML_BACKEND_DEVICE_TYPE_GPU` and `_IGPU`."""

NO_POOLING = 0
"""`LLAMA_POOLING_TYPE_NONE`."""


ENCODE, DECODE = 0, 1
"""`llama_process_type`."""

MTP_CONTEXT = 1
"""`LLAMA_CONTEXT_TYPE_MTP`: a context of the drafting layers inside a model."""


class Embedding(ctypes.Structure):
    """`llama_embd`: rows of numbers next to tokens, or instead of them."""

    _fields_ = (("data", _VOID), ("n_rows", _SIZE), ("n_embd", _SIZE))


class LlamaBatch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", _INT),
        ("token", ctypes.POINTER(_INT)),
        ("embd", ctypes.POINTER(_FLOAT)),
        ("pos", ctypes.POINTER(_INT)),
        ("n_seq_id", ctypes.POINTER(_INT)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(_INT))),
        ("logits", ctypes.POINTER(_INT8)),
    )


class _Value(ctypes.Union):
    _fields_ = (
        ("val_i64", _LONG),
        ("val_f64", ctypes.c_double),
        ("val_bool", _BOOL),
        ("val_str", ctypes.c_char * 128),
    )


class ModelOverride(ctypes.Structure):
    """`llama_model_kv_override`: a replaced metadata value."""

    _fields_ = (("tag", _INT), ("key", ctypes.c_char * 128), ("value", _Value))


def _run(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.POINTER(_VOID)),
        ("tensor_buft_overrides", _VOID),
        *_run(_INT, "n_gpu_layers split_mode load_mode lazy_mode main_gpu"),
        *_run(_VOID, "tensor_split progress_callback progress_callback_user_data"),
        ("kv_overrides", ctypes.POINTER(ModelOverride)),
        *_run(_BOOL, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"),
        _ROOM,
    )


class ContextParams(ctypes.Structure):
    _fields_ = (
        *_run(_UINT, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq"),
        *_run(_UINT, "n_outputs_max n_outputs_max_per_seq"),
        *_run(_INT, "n_threads n_threads_batch ctx_type rope_scaling_type pooling_type"),
        *_run(_INT, "attention_type flash_attn_type"),
        *_run(_FLOAT, "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor"),
        *_run(_FLOAT, "yarn_beta_fast yarn_beta_slow"),
        ("yarn_orig_ctx", _UINT),
        ("defrag_thold", _FLOAT),
        *_run(_VOID, "cb_eval cb_eval_user_data"),
        *_run(_INT, "type_k type_v"),
        ("moe_cache_size", _SIZE),
        *_run(_VOID, "abort_callback abort_callback_data"),
        *_run(_BOOL, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"),
        ("samplers", _VOID),
        ("n_samplers", _SIZE),
        ("ctx_other", _VOID),
        _ROOM,
    )


class EarlierContextParams(ctypes.Structure):
    """The same struct in releases up to 0.5.0 (September 2026)."""

    _fields_ = tuple(field for field in ContextParams._fields_ if field[0] != "moe_cache_size")


DEFAULTS: dict[type[ctypes.Structure], Mapping[str, float]] = {
    ModelParams: {
        "n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1,
        "use_extra_bufts": True,
    },
    ContextParams: {
        "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max_per_seq": 1,
        "n_threads": 4, "n_threads_batch": 4, "rope_scaling_type": -1, "pooling_type": -1,
        "attention_type": -1, "flash_attn_type": -1, "yarn_ext_factor": -1,
        "yarn_attn_factor": -1, "yarn_beta_fast": -1, "yarn_beta_slow": -1, "defrag_thold": -1,
        "type_k": 1, "type_v": 1, "offload_kqv": True, "no_perf": True, "op_offload": True,
        "swa_full": True,
    },
}  # fmt: skip
"""Default values that identify a struct's layout; all others are 0, False or None."""


def _alike(result: Any, arguments: list[Any], names: str) -> dict[str, tuple[Any, list[Any]]]:
    return dict.fromkeys(names.split(), (result, arguments))


_FUNCTIONS: Mapping[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_model_load_from_file": (_VOID, [_TEXT, ModelParams]),
    **_alike(None, [_VOID], "llama_model_free llama_free"),
    **_alike(_VOID, [_VOID], "llama_model_get_vocab llama_get_model llama_get_memory"),
    **_alike(_VOID, [_VOID], "llama_get_logits llama_get_embeddings"),
    **_alike(_BOOL, [_VOID], "llama_model_is_recurrent llama_model_is_hybrid"),
    **_alike(_INT, [_VOID], "llama_vocab_n_tokens llama_model_n_swa llama_model_n_layer"),
    **_alike(_INT, [_VOID], "llama_model_n_embd llama_model_n_head"),
    **_alike(_UINT, [_VOID], "llama_n_rs_seq llama_n_seq_max"),
    **_alike(None, [_VOID, _BOOL], "llama_set_causal_attn llama_set_embeddings"),
    "llama_model_meta_val_str": (_INT, [_VOID, _TEXT, _TEXT, _SIZE]),
    "llama_memory_seq_rm": (_BOOL, [_VOID, _INT, _INT, _INT]),
    "llama_decode": (_INT, [_VOID, LlamaBatch]),
    "llama_state_get_size": (_SIZE, [_VOID]),
    "llama_state_get_data": (_SIZE, [_VOID, _VOID, _SIZE]),
    "llama_state_seq_get_size_ext": (_SIZE, [_VOID, _INT, _UINT]),
    "llama_state_seq_get_data_ext": (_SIZE, [_VOID, _VOID, _SIZE, _INT, _UINT]),
    "llama_state_seq_set_data_ext": (_SIZE, [_VOID, _VOID, _SIZE, _INT, _UINT]),
}

_MAY_LACK: Mapping[str, tuple[Any, list[Any]]] = {
    "ggml_backend_load_all_from_path": (None, [_TEXT]),
    "ggml_backend_dev_count": (_SIZE, []),
    "ggml_backend_dev_get": (_VOID, [_SIZE]),
    "ggml_backend_dev_type": (_INT, [_VOID]),
    **_alike(_TEXT, [_VOID], "ggml_backend_dev_name ggml_backend_dev_description"),
    "ggml_backend_dev_memory": (None, [_VOID, *[ctypes.POINTER(_SIZE)] * 2]),
    "llama_process": (_INT, [_VOID, _INT, _VOID]),
    "llama_batch_ext_init": (_VOID, [_VOID]),
    "llama_batch_ext_free": (None, [_VOID]),
    "llama_batch_ext_add_token": (_INT, [_VOID, _INT, _INT]),
    "llama_batch_ext_add_embd": (_INT, [_VOID, _INT, Embedding]),
    **_alike(
        _BOOL,
        [_VOID, _INT, Embedding],
        "llama_batch_ext_set_embd_token llama_batch_ext_set_embd_state",
    ),
    "llama_batch_ext_set_pos": (_BOOL, [_VOID, _INT, ctypes.POINTER(_INT)]),
    "llama_batch_ext_set_output_logits": (_BOOL, [_VOID, _INT, _BOOL]),
}
"""Functions for devices, which are in other libraries on Windows, and for drafters with a network,
which release 0.5.0 lacks."""

STATES = [name for name in _FUNCTIONS if name.startswith("llama_state_seq")]
"""Functions that size, read and write a sequence's state."""


EXTENSIONS: Mapping[str, tuple[Any, list[Any]]] = {
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb": (None, [_VOID, _UINT, _BOOL]),
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj": (_VOID, [_VOID, _UINT]),
    "_Z26llama_set_embeddings_nextnP13llama_contextbb": (None, [_VOID, _BOOL, _BOOL]),
    "_Z26llama_get_embeddings_nextnP13llama_context": (_VOID, [_VOID]),
}
"""Functions of src/llama-ext.h, which are exported under their C++ names (of GCC and Clang)."""


def load_library(folder: Path | None) -> SimpleNamespace:
    """Load the library and declare its functions.

    Args:
        folder: folder of a custom library, built from the same version; None: the wheel.

    Returns:
        The functions of llama.h that are used, by name; its structs; the library itself as
        `_lib`.

    Raises:
        ImportError: the wheel is not installed.
        OSError: the library cannot be loaded, or its version has different structs.
        AttributeError: a function is missing.
    """
    library = ctypes.CDLL(str(_path(folder)))
    api = SimpleNamespace(
        _lib=library, llama_batch=LlamaBatch, llama_model_kv_override=ModelOverride
    )
    layouts = [(ContextParams, EarlierContextParams), (ModelParams,)]
    contexts, models = (_layout(library, *of_one) for of_one in layouts)
    functions = {
        **_FUNCTIONS,
        "llama_context_default_params": (contexts, []),
        "llama_model_default_params": (models, []),
        "llama_init_from_model": (_VOID, [_VOID, contexts]),
        **_MAY_LACK,
    }
    for name, (result, arguments) in functions.items():
        if name in _MAY_LACK and not hasattr(library, name):
            setattr(api, name, partial(_refuse, name))
            continue
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        setattr(api, name, function)
    api.llama_backend_init()
    return api


def _refuse(name: str, *_: object) -> None:
    raise ModelError(f"this build of llama.cpp does not export {name}; use the wheel of xllamacpp")


def _path(folder: Path | None) -> Path:
    """Return the library's file, without importing the package, which takes long."""
    if folder is not None:
        names = ("libllama.so", "libllama.dylib", "llama.dll", "libllama.*")
        for path in (path for name in names for path in sorted(folder.glob(name))):
            return path
        raise OSError(f"no file named {', '.join(names[:-1])} or {names[-1]}")
    package = find_spec("xllamacpp")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("xllamacpp is not installed")
    for path in sorted(Path(package.submodule_search_locations[0]).glob("xllamacpp*")):
        if path.suffix in (".so", ".pyd"):
            return path
    raise ImportError("xllamacpp has no library")


def _layout(library: ctypes.CDLL, *layouts: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """Return the first layout with default values where the library writes them, or OSError."""
    kind = "model" if ModelParams in layouts else "context"
    defaults = getattr(library, f"llama_{kind}_default_params")
    expected, faults = DEFAULTS[layouts[0]], []
    for layout in layouts:
        defaults.restype = layout
        params = defaults()
        names = [name for name, *_ in params._fields_ if name != _ROOM[0]]
        others = (name for name in names if (getattr(params, name) or 0) != expected.get(name, 0))
        if (fault := next(others, None)) is None:
            return layout
        faults.append(fault)
    raise OSError(
        f"its structs differ from those of build 11549 ({faults[0]} of {layouts[0].__name__} "
        "has a different value); install xllamacpp 2026.10.11549"
    )
