"""Prints one line when a native library ends the process, by an assert or a bad address.

Python runs its own signal handlers between two bytecodes, but a crashed library never returns to
Python. So the signal's C handler is a ctypes callback. Invariant: it writes the line and ends the
process, and touches nothing else, as any state may be corrupt.
"""

import ctypes
import os
import signal
import sys

EXIT = 70  # EX_SOFTWARE of sysexits.h

_CAUSES = {
    signal.SIGABRT: "an assert failed",
    signal.SIGSEGV: "a bad address",
    signal.SIGFPE: "a bad operation",
    signal.SIGILL: "an instruction that this processor lacks",
}
if sys.platform != "win32":
    _CAUSES[signal.SIGBUS] = "a mapped file that was cut or cannot be read"

_LINES = {
    int(number): (
        f"\npaceline: the engine's library has crashed: {cause}. Files of models and prompts are "
        "whole; start it again, or with another --engine\n"
    ).encode()
    for number, cause in _CAUSES.items()
}


def _crashed(number: int) -> None:
    os.write(2, _LINES[number])
    os._exit(EXIT)


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_crashed)
"""The handler, referenced here because C has its address."""


def report_crashes() -> None:
    """Let a crash of a native library end the process with one line and `EXIT`."""
    library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
    for number in _LINES:
        library.signal(number, _HANDLER)
