"""The libraries of llama.cpp's family that are installed here, and which one runs a file.

    ik_llama.cpp   the fastest exact rows on processors; the families and weights that were compared
    llama.cpp      every family and type of weights, and several sequences in a call

The first in this order that computes a file right runs it, unless `PACELINE_LLAMACPP` names one.
The processor must have what a wheel was built for: an illegal instruction ends the process, so that
is asked before the library is loaded. A library that was compiled here has what the processor has.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from paceline.engines.llamacpp.binding import Binding
from paceline.engines.llamacpp.loading import PATHS
from paceline.engines.llamacpp.weights import check_numbers
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.storage.gguf_file import read_gguf

VARIABLE = "PACELINE_LLAMACPP"
"""Environment variable: the name of the only library to use."""

NAMES = ("ik_llama.cpp", "llama.cpp")

_FLAGS = ("avx2", "fma", "f16c")
"""Instructions of x86 that the wheels are built with, as in /proc/cpuinfo."""

_FASTER = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
"""Instructions of ik_llama.cpp's fastest kernels (`HAVE_FANCY_SIMD`), which no wheel has."""

UNUSABLE = (ImportError, OSError, RuntimeError, AttributeError)
"""Errors of a package's own library that cannot be loaded; OSError: not by this processor."""

_INSTALL = (
    "`pip install xllamacpp==2026.10.11549` installs llama.cpp, `pip install ik-llama-cpp-python` "
    "ik_llama.cpp, which has wheels for Python 3.11 to 3.13"
)


def library_for(
    path: Path,
    libraries: Iterable[Binding],
    is_known: Callable[[Binding], bool],
    *,
    shared: bool = False,
    quantized: bool = False,
) -> Binding:
    """The first library that computes a GGUF file right.

    Args:
        path: the file.
        libraries: those to choose from, as `installed` has them.
        is_known: whether a library was chosen for the file before: then the file is not read.
        shared: whether one whose calls several sequences share is better.
        quantized: whether keys and values are to be in Q8_0.

    Raises ModelError if no library computes the file right, and what `installed` raises.
    """
    refusals, content = [], None
    if shared:
        content = gguf = read_gguf(path)
        libraries = sorted(libraries, key=lambda binding: not binding.shares_calls(gguf))
    for binding in libraries:
        if is_known(binding):
            return binding
        content = content or read_gguf(path)
        check_numbers(path, content.fields)
        try:
            binding.check(str(path), content, quantized=quantized)
        except ModelError as error:
            refusals.append(str(error))
        else:
            return binding
    others = "" if len(refusals) == len(NAMES) else f" (or another library: {_INSTALL})"
    raise ModelError("; ".join(refusals) + others)


def installed() -> Iterator[Binding]:
    """The libraries that may be used, loaded one by one as the caller iterates.

    Raises:
        MissingExtra: no library is installed, or none for this processor, or the one at a path of
            the user's own cannot be loaded.
        InvalidRequest: `VARIABLE` names no library.
    """
    reasons, count = [], 0
    for name in allowed():
        try:
            binding = load(name)
        except UNUSABLE as error:
            reasons.append(f"{name}: {error}")
        else:
            count += 1
            yield binding
    if not count:
        raise MissingExtra(
            f"the engine llamacpp needs a library of llama.cpp's family: {_INSTALL} "
            f"({'; '.join(reasons)})"
        )


@cache
def load(name: str) -> Binding:
    """Load a library. Raises one of `UNUSABLE`, or MissingExtra for one at a path of one's own."""
    lacking, path = missing_instructions(), os.environ.get(PATHS[name])
    if lacking and not path:
        raise OSError(f"this processor has no {', '.join(lacking)}, which its wheel is built with")
    try:
        if name == "llama.cpp":
            from paceline.engines.llamacpp.upstream import Llama

            return Llama()
        from paceline.engines.llamacpp.ik import IkLlama

        return IkLlama()
    except UNUSABLE as error:
        if not path:
            raise
        raise MissingExtra(
            f"${PATHS[name]} is {path}, where {name} cannot be loaded: {error}; "
            "name another library, or none for the package's own"
        ) from error


def missing_instructions(
    cpuinfo: Path = Path("/proc/cpuinfo"), wanted: Sequence[str] = _FLAGS
) -> list[str]:
    """Those of `wanted` that an x86 processor lacks; empty where that cannot be read."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return []
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return [flag for flag in wanted if flags and flag not in flags]


def faster_build(binding: Binding, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """How to get ik_llama.cpp for the instructions of this processor; empty: it is, or has none."""
    if binding.name != NAMES[0] or platform.machine() != "x86_64" or not cpuinfo.exists():
        return ""
    describe = binding.library.llama_print_system_info
    describe.restype = ctypes.c_char_p
    if b"AVX512_VNNI = 0" not in describe() or missing_instructions(cpuinfo, _FASTER):
        return ""
    return (
        "This processor has AVX-512 VNNI, unused by the wheel of ik_llama.cpp. Ten minutes "
        "make a build that does (on a Zen 5 it read prompts twice as fast):\n"
        "  pip download --no-deps --no-binary :all: -d ik ik-llama-cpp-python=="
        f"{binding.version.split()[0]} && tar xzf ik/*.gz -C ik --strip-components 1 && cmake -S "
        "ik/vendor/ik_llama.cpp -B ik/build -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON && cmake "
        f"--build ik/build -j -t llama && export {PATHS[NAMES[0]]}=$PWD/ik/build/src/libllama.so"
    )


def allowed() -> tuple[str, ...]:
    """Names of the libraries that `VARIABLE` allows."""
    name = os.environ.get(VARIABLE)
    if name and name not in NAMES:
        raise InvalidRequest(f"${VARIABLE} is {name!r}; expected {' or '.join(NAMES)}")
    return (name,) if name else NAMES
