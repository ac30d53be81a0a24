"""The library's log: nothing is printed, and its last lines about errors go into ours."""

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ERROR, _CONTINUED = 4, 5
"""`ggml_log_level` of ik_llama.cpp and llama.cpp; a continued line has the last one's level."""

_LINES = 3

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


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


@contextmanager
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
