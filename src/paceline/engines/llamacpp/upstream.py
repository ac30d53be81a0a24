"""The binding of llama.cpp itself, from the wheel of xllamacpp (`llama_h.py`).

`LLAMA_CPP_LIB_PATH` selects a folder of custom libraries, built from the same version. A row's bits
depend on the rows of its pass (`rules.py`), and on the following:

- Weights that are repacked when a file is loaded (`use_extra_bufts`) have kernels for 1 to 3, 4 and
  8 rows: switched off.
- Attention divides the keys of a single row among the threads, and tiles 64 rows or more, only if
  keys and values have the same type (`ggml_compute_forward_flash_attn_ext_f16`): so values are F16,
  and keys Q8_0, or BF16 if the head size is not a multiple of its groups of 32. Both decode as fast
  as F16 alone. Masked keys are skipped one by one.

On a GPU keys and values are F16: with keys in Q8_0, rows 1 and 2 were a class, and no class made
longer drafts cheaper.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from paceline.decoding.types import Logits
from paceline.engines.llamacpp.binding import Binding, ContextSettings, Device, Offload, State
from paceline.engines.llamacpp.llama_h import (
    EXTENSIONS,
    FLASH_ATTENTION,
    GPUS,
    NO_POOLING,
    STATES,
    TYPES,
    load_library,
)
from paceline.engines.llamacpp.weights import CONVOLUTIONS, FLOATS, TILED, check_kinds, window_of
from paceline.errors import ModelError
from paceline.storage.gguf_file import GgufFile, NumberArray

COMPARED = (*FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", *TILED)
"""Weight types that were compared with their values; others are refused."""

_HEADER, _COUNT = 8, 4
"""Bytes of a sequence's state before its slots, and of a number in it."""

_ONE = np.array([1], np.uint32).view(np.uint8)


class Llama(Binding):
    name = "llama.cpp"
    cache = "keys in q8_0 (bf16 in odd heads), values in f16"
    embeds = True
    rolls_back = True

    def __init__(self, folder: Path | None) -> None:
        """Load the library in a custom folder, or the wheel's.

        Raises ImportError or OSError if it is missing, cannot be loaded or has another version,
        AttributeError if a function is missing.
        """
        api = load_library(folder)
        super().__init__(api, STATES)
        if folder is not None and self._device_count() == 0:  # its backends are plug-ins
            api.ggml_backend_load_all_from_path(bytes(folder))
        self._header: State | None = None

    def check(self, name: str, content: GgufFile, *, quantized: bool = False) -> None:
        window_of(self.name, name, content)
        sections = content.family_value("rope.dimension_sections")
        head = content.family_value("attention.key_length")
        if isinstance(sections, NumberArray) and isinstance(head, int):
            rotated = int(np.sum(sections.values))
            if rotated > head:
                raise ModelError(
                    f"{name} has position sections of {rotated} numbers in a head of {head}, "
                    f"which crashes {self.name}"
                )
        check_kinds(self.name, name, content, COMPARED)

    def shares_calls(self, content: GgufFile) -> bool:
        """See `Binding.shares_calls`: states of windows and recurrent layers hold one sequence."""
        recurrent = any(tensor.name.endswith(CONVOLUTIONS) for tensor in content.tensors)
        return not content.family_value("attention.sliding_window") and not recurrent

    def devices(self) -> list[Device]:
        api, devices = self.api, []
        for number in range(self._device_count() or 0):
            pointer = api.ggml_backend_dev_get(number)
            if api.ggml_backend_dev_type(pointer) in GPUS:
                free, total = ctypes.c_size_t(), ctypes.c_size_t()
                api.ggml_backend_dev_memory(pointer, ctypes.byref(free), ctypes.byref(total))
                name, about = (
                    function(pointer).decode(errors="replace")
                    for function in (api.ggml_backend_dev_name, api.ggml_backend_dev_description)
                )
                devices.append(Device(name, about, free.value, pointer))
        return devices

    def _device_count(self) -> int | None:
        """Return the number of devices with the CPU, or None if none are exported (Windows)."""
        known = hasattr(self.library, "ggml_backend_dev_count")
        return int(self.api.ggml_backend_dev_count()) if known else None

    def model_params(self, offload: Offload | None) -> Any:
        params = super().model_params(offload)
        params.use_extra_bufts = False
        pointers = [] if offload is None else [offload.device.pointer]
        params.devices = (ctypes.c_void_p * (len(pointers) + 1))(*pointers)  # the last is none
        params.n_gpu_layers = 0 if offload is None else offload.layers
        return params

    def context(self, model: int, settings: ContextSettings) -> int | None:
        params = self.api.llama_context_default_params()
        params.n_ctx = settings.slots * settings.sequences
        params.n_batch = params.n_ubatch = settings.rows
        params.n_outputs_max = min(settings.rows, settings.outputs)
        params.n_seq_max = settings.sequences  # each with its own keys and values
        params.n_rs_seq = settings.rollback
        params.pooling_type = NO_POOLING
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn_type = FLASH_ATTENTION
        keys = "q8_0" if self.has_whole_groups(model) else "bf16"
        is_f16 = settings.offloaded and not settings.quantized
        params.type_k = TYPES["f16" if is_f16 else keys]
        params.type_v = TYPES["q8_0" if settings.quantized else "f16"]
        params.swa_full = True  # positions dropped from a window could not be restored
        params.offload_kqv = params.op_offload = settings.offloaded
        pointer: int | None = self.api.llama_init_from_model(model, params)
        if pointer:
            self._set_taps(pointer, settings.taps)
        if pointer and self._header is None:
            self._header = self._sequence_state(pointer, 0)[:_HEADER]
        return pointer

    def has_taps(self, taps: tuple[int, ...], layers: int) -> bool:
        return True

    def _set_taps(self, context: int, taps: tuple[int, ...]) -> None:
        """Make a context's passes output hidden states: the inputs of the next layer."""
        for tap in taps:
            if self._is_last(context, tap):
                self.extension("set_embeddings_nextn")(context, True, False)
            else:
                self.extension("set_embeddings_layer_inp")(context, tap + 1, True)

    def tapped(self, context: int, tap: int, shape: tuple[int, int]) -> Logits:
        if self._is_last(context, tap):
            address = self.extension("get_embeddings_nextn")(context)
        else:
            address = self.extension("get_embeddings_layer_inp")(context, tap + 1)
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), shape)

    def _is_last(self, context: int, tap: int) -> bool:
        return bool(tap + 1 == self.api.llama_model_n_layer(self.api.llama_get_model(context)))

    def extension(self, name: str) -> Any:
        """Return a function of llama-ext.h. Raises ModelError if the library does not export it."""
        symbol = next(symbol for symbol in EXTENSIONS if f"llama_{name}P" in symbol)
        result, arguments = EXTENSIONS[symbol]
        try:
            function = getattr(self.library, symbol)
        except AttributeError as error:
            raise ModelError(
                f"this build of {self.name} does not export {symbol}, which neural drafters need; "
                "use another drafter, or the wheel of xllamacpp"
            ) from error
        function.restype, function.argtypes = result, arguments
        return function

    def free_model(self, model: int) -> None:
        self.api.llama_model_free(model)

    def is_recurrent(self, model: int) -> bool:
        kinds = (self.api.llama_model_is_recurrent, self.api.llama_model_is_hybrid)
        return any(kind(model) for kind in kinds)

    def rollback(self, context: int) -> int:
        """See `Binding.rollback`: it is silently 0 for unsupported families."""
        return int(self.api.llama_n_rs_seq(context))

    def truncate(self, context: int, sequence: int, length: int) -> bool:
        memory = self.api.llama_get_memory(context)
        return bool(self.api.llama_memory_seq_rm(memory, sequence, length, -1))

    def read_state(self, context: int, sequence: int, flags: int = 0) -> State:
        """See `Binding.read_state`.

        A sequence's state lacks the keys and values that a window hides from its last position,
        but the sequence may be shortened later. A whole context's state is complete, but after it
        is read, the next tokens go to the first slots. So it gets a sequence's header, and is read
        as one; the context of a model with a window has one sequence.

            of a context    length of a name, the name, slots
            of a sequence   a number, the sequence's id, slots
        """
        if flags:
            return super().read_state(context, sequence, flags)
        if not self.api.llama_model_n_swa(self.api.llama_get_model(context)):
            return self._sequence_state(context, sequence)
        size = self.api.llama_state_get_size(context)
        state = np.empty(_HEADER + size, np.uint8)
        whole = state[_HEADER:]
        if self.api.llama_state_get_data(context, whole.ctypes.data, size) != size:
            return state[:0]
        slots = 4 + int(whole[:4].view(np.uint32)[0])
        whole_slots = state[slots:]  # with a header in front of them
        whole_slots[:_HEADER] = self._header
        return whole_slots

    def _sequence_state(self, context: int, sequence: int) -> State:
        """Return a sequence's state, as if it were the only one of its context.

        Its slots are a list with an entry per sequence of the context; other entries are empty.
        The bytes before its own entry are overwritten, so that nothing moves:

            of the second of three   number, id, 3, 0, slots, 0
            as the only one                  number, id, 1, slots
        """
        state = super().read_state(context, sequence)
        others = self.api.llama_n_seq_max(context) - 1
        if not others:
            return state
        alone = state[_COUNT * sequence : state.size - _COUNT * (others - sequence)]
        alone[:_HEADER], alone[_HEADER : _HEADER + _COUNT] = state[:_HEADER].copy(), _ONE
        return alone

    def write_state(self, context: int, sequence: int, state: State, flags: int = 0) -> int:
        others = self.api.llama_n_seq_max(context) - 1
        if others and not flags:
            count = np.array([1 + others], np.uint32).view(np.uint8)
            slots, empty = state[_HEADER + _COUNT :], np.zeros(_COUNT * others, np.uint8)
            state = np.concatenate([state[:_HEADER], count, slots, empty])
        return super().write_state(context, sequence, state, flags)
