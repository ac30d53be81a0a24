"""Finds the installed llama.cpp libraries, and decides which one runs a file, and where.

    ik_llama.cpp   fastest exact rows on CPUs; only the families and weights that were compared
    llama.cpp      every family and weight type, and several sequences in a pass

The first of these that computes a file correctly runs it, unless `PACELINE_LLAMACPP` selects one.
The CPU must have the instructions that a wheel was built for: an illegal one ends the process, so
they are checked before the library is loaded. A library compiled on this machine uses only those.

The last layers of a file may run on a llama.cpp device, the others on the CPU:

    --device cpu      the CPU
    --device gpu      the device with the most free memory; a name: that device
    --device auto     the same if all layers and a full KV cache fit; otherwise the CPU
"""

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from paceline.decoding.types import FINAL_NORM
from paceline.engines.base import EngineSettings
from paceline.engines.llamacpp.binding import Binding, Device, Offload
from paceline.engines.llamacpp.weights import check_numbers
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.storage.files import digest_of
from paceline.storage.gguf_file import GgufFile, NumberArray, read_gguf
from paceline.storage.shards import shards_beside
from paceline.system.machine import may_have_gpu

VARIABLE = "PACELINE_LLAMACPP"
"""Environment variable: the name of the only library to use."""

NAMES = _IK, _LLAMA = "ik_llama.cpp", "llama.cpp"

PATHS = {_IK: "IK_LLAMA_CPP_LIB_PATH", _LLAMA: "LLAMA_CPP_LIB_PATH"}
"""Environment variables of custom libraries: the file, or for llama.cpp its folder."""

_WAITING = {"GOMP_SPINCOUNT": "1000", "OMP_WAIT_POLICY": "active"}
"""See `_short_spins`."""

_SUFFIXES = (".so", ".dylib", ".dll")

_FLAGS = ("avx2", "fma", "f16c")
"""x86 instructions that the wheels are built with, as in /proc/cpuinfo."""

_FASTER = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
"""Instructions of ik_llama.cpp's fastest kernels (`HAVE_FANCY_SIMD`), unused by all wheels."""

_BUILDS = (
    "the package index of xllamacpp has builds with CUDA, ROCm and Vulkan, and "
    f"${PATHS[_LLAMA]} selects your own build"
)

_RESERVE = 512 << 20
"""Bytes of device memory reserved for forward passes and other programs; not measured."""

_NUMBER_BYTES = {None: 2.0, "q8_0": 34 / 32}
"""KV cache type on a device -> bytes per number."""

_UNUSABLE = (ImportError, OSError, RuntimeError, AttributeError)
"""Errors of a library that cannot be loaded; OSError: not on this CPU."""

_INSTALL = (
    "`pip install xllamacpp==2026.10.11549` installs llama.cpp, `pip install ik-llama-cpp-python` "
    "ik_llama.cpp, which has wheels for Python 3.11 to 3.13"
)


def library_for(
    path: Path,
    libraries: Iterable[Binding],
    is_known: Callable[[Binding], bool],
    *,
    taps: tuple[int, ...] = (),
    shared: bool = False,
    quantized: bool = False,
) -> Binding:
    """Return the first library that computes a GGUF file correctly.

    Args:
        path: the file.
        libraries: the candidates, from `installed`.
        is_known: True if a library was chosen for the file before: the file is then not read.
        taps: see `EngineSettings.taps`; libraries that cannot output them are skipped.
        shared: True to prefer a library whose passes several sequences can share.
        quantized: True if keys and values should be in Q8_0.

    Raises ModelError if no library computes the file correctly, and the errors of `installed`.
    """
    refusals, content = [], None
    # One by one: a library that is not needed is not loaded.
    libraries = (binding for binding in libraries if _has_taps(binding, path, taps))
    if shared:
        content = gguf = read_gguf(path)
        libraries = sorted(libraries, key=lambda binding: not binding.shares_calls(gguf))
    for binding in libraries:
        if is_known(binding):
            return binding
        content = content or read_gguf(path)
        check_numbers(path, content)
        try:
            binding.check(str(path), content, quantized=quantized)
        except ModelError as error:
            refusals.append(str(error))
        else:
            return binding
    others = "" if len(refusals) == len(NAMES) else f" (or another library: {_INSTALL})"
    raise ModelError("; ".join(refusals) + others)


def _has_taps(binding: Binding, path: Path, taps: tuple[int, ...]) -> bool:
    """Return True if a library's passes output the hidden states that are needed.

    Raises InvalidRequest for a layer that the model does not have.
    """
    if not taps or FINAL_NORM in taps:
        return binding.embeds or not taps
    content = read_gguf(path)
    layers = content.family_value("block_count", 0)
    layers -= content.family_value("nextn_predict_layers", 0)
    if max(taps) >= layers:
        raise InvalidRequest(
            f"hidden states after layer {max(taps)} are needed, but {path.name} has {layers} "
            "layers; use a drafter made for this model"
        )
    return binding.has_taps(taps, layers)


def installed() -> Iterator[Binding]:
    """Yield the allowed libraries, loading each as the caller iterates.

    Raises:
        MissingExtra: no library is installed, or none runs on this CPU, or a custom library
            cannot be loaded.
        InvalidRequest: `VARIABLE` has an unknown library.
    """
    reasons, count = [], 0
    for name in allowed():
        try:
            binding = load(name)
        except _UNUSABLE as error:
            reasons.append(f"{name}: {error}")
        else:
            count += 1
            yield binding
    if not count:
        raise MissingExtra(
            f"the engine llamacpp needs llama.cpp or ik_llama.cpp: {_INSTALL} "
            f"({'; '.join(reasons)})"
        )


def load(name: str) -> Binding:
    """Load a library, once. Raises one of `_UNUSABLE`, or MissingExtra for a custom library."""
    with _LOADING:
        return _load(name)


_LOADING = threading.Lock()
"""Otherwise two threads may load two bindings, and each counts only its own open models."""


@cache
def _load(name: str) -> Binding:
    lacking, path = missing_instructions(), os.environ.get(PATHS[name])
    if lacking and not path:
        raise OSError(f"this CPU lacks {', '.join(lacking)}, which its wheel is built with")
    binding: Binding
    try:
        with _short_spins():
            if name == _LLAMA:
                from paceline.engines.llamacpp.upstream import Llama

                binding, package = Llama(library_folder(name)), "xllamacpp"
            else:
                from paceline.engines.llamacpp.ik import IkLlama

                binding, package = IkLlama(), "ik-llama-cpp-python"
        binding.version = version_of(package, name)
    except _UNUSABLE as error:
        if not path:
            raise
        raise MissingExtra(
            f"{name} cannot be loaded from ${PATHS[name]} ({path}): {error}; "
            "set another path, or unset it to use the package's library"
        ) from error
    return binding


@contextlib.contextmanager
def _short_spins() -> Iterator[None]:
    """Load the library's OpenMP with a short wait before a thread sleeps.

    A waiting thread spins, billions of times by default. If another program uses the CPU, the
    thread that it waits for cannot run in that time: with a load of 11 on two cores, a pass of
    10 ms took up to 2.8 s; with 1,000 spins at most 33 ms (2026-11-25).

    The policy is also the best one when passes run in a second thread, as in a server: OpenMP then
    has two teams, more threads than cores, and otherwise spins only 100 times. With a barrier after
    each of hundreds of operations, its threads slept and woke all the time: SmolLM2 135M generated
    47 tokens per second, now 130 (2026-11-26).
    """
    ours = {name: value for name, value in _WAITING.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def library_folder(name: str) -> Path | None:
    path = os.environ.get(PATHS[name])
    return Path(path) if path else None


def version_of(package: str, name: str) -> str:
    """Return a library package's version, with a digest of its build; with a custom path."""
    from importlib.metadata import distribution

    packaged = distribution(package)
    path = os.environ.get(PATHS[name])
    if not path:
        files = packaged.files or ()
        built = [str(file.hash) for file in files if set(file.suffixes).intersection(_SUFFIXES)]
        return f"{packaged.version} ({digest_of(built)[:8]})"
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    stats = [
        (file.name, stat.st_size, stat.st_mtime_ns)
        for file in sorted(folder.iterdir())
        if set(file.suffixes).intersection(_SUFFIXES)
        for stat in [file.stat()]
    ]
    return f"{packaged.version}, own build {path} {digest_of(stats)[:8]}"


def missing_instructions(
    cpuinfo: Path = Path("/proc/cpuinfo"), wanted: Sequence[str] = _FLAGS
) -> list[str]:
    """Return those of `wanted` that an x86 CPU lacks; empty if that cannot be read."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return []
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return [flag for flag in wanted if flags and flag not in flags]


def faster_build(binding: Binding, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return how to build ik_llama.cpp for this CPU's instructions; empty if not useful."""
    if binding.name != _IK or platform.machine() != "x86_64" or not cpuinfo.exists():
        return ""
    describe = binding.library.llama_print_system_info
    describe.restype = ctypes.c_char_p
    if b"AVX512_VNNI = 0" not in describe() or missing_instructions(cpuinfo, _FASTER):
        return ""
    return (
        "This CPU supports AVX-512 VNNI, which the ik_llama.cpp wheel does not use. Building it "
        "with VNNI takes ten minutes (on a Zen 5, it read prompts twice as fast):\n"
        "  pip download --no-deps --no-binary :all: -d ik ik-llama-cpp-python=="
        f"{binding.version.split()[0]} && tar xzf ik/*.gz -C ik --strip-components 1 && cmake -S "
        "ik/vendor/ik_llama.cpp -B ik/build -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON && cmake "
        f"--build ik/build -j -t llama && export {PATHS[_IK]}=$PWD/ik/build/src/libllama.so"
    )


def allowed() -> tuple[str, ...]:
    """Return the names of the libraries that `VARIABLE` allows."""
    name = os.environ.get(VARIABLE)
    if name and name not in NAMES:
        raise InvalidRequest(f"${VARIABLE} is {name!r}; expected {' or '.join(NAMES)}")
    return (name,) if name else NAMES


def library_with_devices(device: str) -> Binding | None:
    """Return the library with devices if `device` needs one; None: the CPU is enough."""
    if device == "cpu" or (device == "auto" and not (library_folder(_LLAMA) or may_have_gpu())):
        return None
    error: Exception | str = f"${VARIABLE} excludes it"
    if _LLAMA in allowed():
        try:
            return load(_LLAMA)
        except _UNUSABLE as failure:
            error = failure
    if device == "auto":  # the next library is tried, or reports the error
        return None
    raise MissingExtra(
        f"--device {device} needs {_LLAMA}, which cannot be loaded: {error}; {_BUILDS}"
    )


def device_for(path: Path) -> str | None:
    """Return where `--device auto` runs a GGUF file; None without a usable device."""
    try:
        library = library_with_devices("auto")
        if not library or not (devices := library.devices()):
            return None
        length = _number(read_gguf(path), "context_length", 1)
        offload = offload_for(library, devices, path, length, EngineSettings())
    except (MissingExtra, ModelError):
        return None
    return "the CPU" if offload is None else str(offload)


def offload_for(
    binding: Binding,
    devices: Sequence[Device],
    path: Path,
    context_length: int,
    settings: EngineSettings,
) -> Offload | None:
    """Return the layers of a file that a device of the library runs; None: the CPU runs all.

    Raises InvalidRequest for a missing device, ModelError if nothing of the file fits.
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
            f"--device is {asked!r}, but {binding.name} {binding.version} {which} --device cpu "
            f"({_BUILDS})"
        )
    if not candidates or FINAL_NORM in settings.taps:  # embeddings need outputs of all rows
        return None
    device = max(candidates, key=lambda candidate: candidate.free)
    offload = _fitting(path, device, context_length, settings)
    if is_auto and not offload.is_whole:
        settings.progress.note(
            f"{path.name} runs on the CPU: with its KV cache it does not fit into {device}; "
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
    """Return the layers that fit if each, and the output, has an equal part of weights and KV.

    Without `cache_tokens`, the cache has one context; on a device with all layers, all that fits.
    """
    content = read_gguf(path)
    layers = _number(content, "block_count")
    heads = _number(content, "attention.head_count", 1)
    size = _number(content, "embedding_length") // max(heads, 1)
    sizes = [_number(content, f"attention.{name}_length", size) for name in ("key", "value")]
    numbers = layers * _number(content, "attention.head_count_kv", heads) * sum(sizes)
    slot = max(round(numbers * _NUMBER_BYTES[settings.kv_cache_type]), 1)
    slots = replace(settings, contexts=1).slots(context_length, slot)
    weights = sum(shard.stat().st_size for shard in shards_beside(path))
    room = max(device.free - _RESERVE, 0)
    count = (layers + 1) * room // (weights + slots * slot)
    if count <= layers:
        return Offload(device, count, is_whole=False, slots=slots)
    return Offload(device, layers + 1, is_whole=True, slots=(room - weights) // slot)


def _number(content: GgufFile, key: str, default: int = 0) -> int:
    """Return a number of the file's family, the largest if layers differ."""
    value = content.family_value(key, default)
    return int(np.max(value.values)) if isinstance(value, NumberArray) else int(value)
