"""Where a GGUF file runs: on the processor, or its last layers on a device of llama.cpp's library.

--device cpu      the processor
--device gpu      the device with the most free memory; a name: that device
--device auto     the same, if all layers and a full KV cache fit; else the processor
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.decoding.types import FINAL_NORM
from paceline.engines.base import EngineSettings
from paceline.engines.llamacpp.binding import Binding, Device, Offload
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.engines.llamacpp.libraries import UNUSABLE, VARIABLE, allowed, load
from paceline.engines.llamacpp.loading import PATHS, library_folder
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.storage.gguf_file import GgufFile, NumberArray, read_gguf
from paceline.storage.shards import shards_beside
from paceline.system.machine import may_have_gpu

_LIBRARY = "llama.cpp"

_BUILDS = (
    "the package index of xllamacpp has builds with CUDA, ROCm and Vulkan, and "
    f"${PATHS[_LIBRARY]} names a build of your own"
)

_RESERVE = 512 << 20
"""Bytes of a device's memory that are left to calls and to other programs; not measured."""

_NUMBER_BYTES = {None: 2.0, "q8_0": 34 / 32}
"""Type of keys and values on a device -> bytes of a number."""


def open_llamacpp(
    path: Path, context_length: int, settings: EngineSettings, binding: Binding | None = None
) -> LlamaCppEngine:
    """Open a GGUF file where `settings.device` says; see `LlamaCppEngine`.

    Raises InvalidRequest for a device that is not there, MissingExtra without the library of one.
    """
    library = binding or _library_with_devices(settings.device)
    devices = library.devices() if library and settings.device != "cpu" else []
    offload = library and offload_for(library, devices, path, context_length, settings)
    engine = None
    if offload:
        try:
            engine = LlamaCppEngine(
                path, context_length, settings, binding=library, offload=offload
            )
        except ModelError as error:
            if settings.device != "auto":
                raise
            settings.progress.say(f"{path.name} runs on the processor: {error}")
    where = str(offload) if engine else "all layers on the processor"
    engine = engine or LlamaCppEngine(path, context_length, settings, binding=binding)
    if devices:
        engine.remark = f"{where}; devices: {', '.join(map(str, devices))}"
    return engine


def _library_with_devices(device: str) -> Binding | None:
    """The library with devices, if `device` asks for one; None: the processor is enough."""
    if device == "cpu" or (device == "auto" and not (library_folder(_LIBRARY) or may_have_gpu())):
        return None
    error: Exception | str = f"${VARIABLE} leaves it out"
    if _LIBRARY in allowed():
        try:
            return load(_LIBRARY)
        except UNUSABLE as failure:
            error = failure
    if device == "auto":  # the next library is asked, or says what is missing
        return None
    raise MissingExtra(
        f"--device {device} needs {_LIBRARY}, which cannot be loaded: {error}; {_BUILDS}"
    )


def device_for(path: Path) -> str | None:
    """Where `--device auto` runs a GGUF file; None: there is no device, or something is broken."""
    try:
        library = _library_with_devices("auto")
        if not library or not (devices := library.devices()):
            return None
        length = _number(read_gguf(path), "context_length", 1)
        offload = offload_for(library, devices, path, length, EngineSettings())
    except (MissingExtra, ModelError):
        return None
    return "the processor" if offload is None else str(offload)


def offload_for(
    binding: Binding,
    devices: Sequence[Device],
    path: Path,
    context_length: int,
    settings: EngineSettings,
) -> Offload | None:
    """The layers of a file that a device of the library takes; None: the processor runs them.

    Raises InvalidRequest if there is no such device, ModelError if nothing of the file fits.
    """
    asked, is_auto = settings.device, settings.device == "auto"
    candidates = [
        device
        for device in devices
        if asked in ("gpu", device.name) or (is_auto and not device.is_software)
    ]
    if not candidates and asked not in ("auto", "cpu"):
        names = ", ".join(map(str, devices))
        which = f"has: {names}; use one of them, or" if devices else "has none; use"
        raise InvalidRequest(
            f"--device is {asked!r}, and {binding.name} {binding.version} {which} --device cpu "
            f"({_BUILDS})"
        )
    if not candidates or FINAL_NORM in settings.taps:  # of embeddings all rows have outputs
        return None
    device = max(candidates, key=lambda candidate: candidate.free)
    offload = _fitting(path, device, context_length, settings)
    if is_auto and not offload.is_whole:
        settings.progress.say(
            f"{path.name} runs on the processor: with its KV cache it does not fit into {device}; "
            f"--device gpu puts {offload.layers} layers there"
        )
        return None
    if not offload.layers:
        raise ModelError(
            f"not one layer of {path.name} fits into {device}; use fewer --cache-tokens, a smaller "
            "model, or --device cpu"
        )
    return offload


def _fitting(path: Path, device: Device, context_length: int, settings: EngineSettings) -> Offload:
    """The layers that fit, as if all and the output had the same part of weights and KV cache.

    Without `cache_tokens` the cache has one context, and on a device with all layers what is left.
    """
    content = read_gguf(path)
    layers = _number(content, "block_count")
    heads = _number(content, "attention.head_count", 1)
    size = _number(content, "embedding_length") // max(heads, 1)
    sizes = [_number(content, f"attention.{name}_length", size) for name in ("key", "value")]
    numbers = layers * _number(content, "attention.head_count_kv", heads) * sum(sizes)
    slot = max(round(numbers * _NUMBER_BYTES[settings.kv]), 1)
    slots = replace(settings, contexts=1).slots(context_length, slot)
    weights = sum(shard.stat().st_size for shard in shards_beside(path))
    room = max(device.free - _RESERVE, 0)
    count = (layers + 1) * room // (weights + slots * slot)
    if count <= layers:
        return Offload(device, count, is_whole=False, slots=slots)
    return Offload(device, layers + 1, is_whole=True, slots=(room - weights) // slot)


def _number(content: GgufFile, key: str, default: int = 0) -> int:
    """A number of the file's family, the largest where layers differ."""
    value = content.fields.get(f"{content.fields.get('general.architecture')}.{key}", default)
    return int(np.max(value.values)) if isinstance(value, NumberArray) else int(value)
