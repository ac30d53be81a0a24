"""Loading a library: how its threads wait, which file it is, and what it logs.

Nothing of its log is printed, and its last lines about errors go into ours.
"""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from paceline.storage.files import digest_of

PATHS = {"ik_llama.cpp": "IK_LLAMA_CPP_LIB_PATH", "llama.cpp": "LLAMA_CPP_LIB_PATH"}
"""Environment variables with a library of one's own: its file, or for llama.cpp its folder."""

_WAITING = {"GOMP_SPINCOUNT": "1000", "OMP_WAIT_POLICY": "active"}
"""See `short_spins`."""

_SUFFIXES = (".so", ".dylib", ".dll")

_ERROR, _CONTINUED = 4, 5
"""`ggml_log_level` of ik_llama.cpp and llama.cpp; a continued line has the last one's level."""

_LINES = 3

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@contextlib.contextmanager
def short_spins() -> Iterator[None]:
    """Load the library's OpenMP with a short wait before a thread sleeps.

    A thread that waits for another one spins, billions of times by default. Where another program
    uses the processor, the one that is waited for does not run meanwhile: with a load of 11 on two
    cores a call of 10 ms took up to 2.8 s; with 1,000 spins at most 33 ms (2026-11-25).

    The policy keeps the same number where calls are made from a second thread, as a server's are:
    OpenMP then has two teams, more threads than cores, and spins 100 times. With a barrier after
    each of hundreds of operations, its threads slept and woke all the time: SmolLM2 135M made 47
    tokens a second, now 130 (2026-11-26).
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
    """Version of a library's package, with a digest of its build; with the path of one's own."""
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


class ErrorLog:
    """Keeps the last error lines of a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Receive the library's log from now on."""
        self._lines: list[str] = []
        self._error = False
        self._callback = _CALLBACK(self._receive)  # the library keeps a pointer to it
        library.llama_log_set.argtypes = [_CALLBACK, ctypes.c_void_p]
        library.llama_log_set.restype = None
        library.llama_log_set(self._callback, None)

    def clear(self) -> None:
        """Forget earlier lines."""
        self._lines = []

    def line(self) -> str:
        return "; ".join(self._lines)

    def _receive(self, level: int, text: bytes | None, _: object) -> None:
        if level != _CONTINUED:
            self._error = level == _ERROR
        line = (text or b"").decode(errors="replace").strip()
        if self._error and line:
            self._lines = [*self._lines, line][-_LINES:]


@contextlib.contextmanager
def interrupts_after() -> Iterator[None]:
    """Ctrl-C comes after the block, for calls that write lines of the log.

    What a callback from C raises is printed and lost, and with it the KeyboardInterrupt.
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
