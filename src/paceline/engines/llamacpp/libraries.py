"""The libraries of llama.cpp's family that are installed here.

The processor must have what they were built for: an illegal instruction ends the process, so that
is asked before a library is loaded.
"""

import platform
from functools import cache
from pathlib import Path

from paceline.engines.llamacpp.binding import Binding
from paceline.errors import MissingExtra

_FLAGS = ("avx2", "fma", "f16c")
"""Instructions of x86 that the wheels are built with, as in /proc/cpuinfo."""


@cache
def installed() -> Binding:
    """The fastest library that is installed.

    Raises MissingExtra, which says what to install, or what the processor lacks.
    """
    lacking = missing_instructions()
    if lacking:
        raise MissingExtra(
            f"this processor has no {', '.join(lacking)}, which the libraries of the engine "
            "llamacpp are built with; use --engine openvino"
        )
    reasons = []
    for make in (_ik,):
        try:
            return make()
        except (ImportError, OSError, AttributeError) as error:
            reasons.append(str(error))
    raise MissingExtra(
        "the engine llamacpp needs a library of llama.cpp's family: `pip install "
        f"'paceline[llamacpp]'` ({'; '.join(reasons)})"
    )


def missing_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Instructions of `_FLAGS` that an x86 processor lacks; empty where that cannot be read."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return []
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return [flag for flag in _FLAGS if flags and flag not in flags]


def _ik() -> Binding:
    from paceline.engines.llamacpp.ik import IkLlama

    return IkLlama()
