"""Handles Ctrl-C before a command works and after it has ended: prints one line, at once.

Imports no other paceline module and little else. While a command works, Ctrl-C is a
KeyboardInterrupt, so that it can clean up; in an import it would cause a traceback or an error.
"""

# `signal` itself takes milliseconds, and until it is handled Ctrl-C is a traceback.
import _signal as signal  # type: ignore[import-not-found]
import _thread
import os
import sys
import time

EXIT: int = 128 + signal.SIGINT
LINE = "\npaceline: stopped\n"

_AGAIN_SECONDS = 0.01


def stop_at_once() -> None:
    """Let Ctrl-C end the process without a cleanup."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def stop_by_exception() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, and raise it again if Python has lost it.

    Python prints and drops errors without a caller: in a finalizer, in a callback of a weak
    reference (each import ends with one), in a function that C calls.
    """
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = _interrupt_again


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an error comes from Ctrl-C.

    In an import, a compiled package turns it into an ImportError, and Python 3.11 into a
    RuntimeError while setting the attribute names of a class.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _stop(*_: object) -> None:
    os.write(2, LINE.encode())
    os._exit(EXIT)


def _interrupt_again(unraisable: "sys.UnraisableHookArgs") -> None:
    if is_interrupt(unraisable.exc_value):
        # From another thread, because this hook would also lose it.
        _thread.start_new_thread(_interrupt_soon, (_thread.get_ident(),))
    else:
        sys.__unraisablehook__(unraisable)


def _interrupt_soon(thread: int) -> None:
    time.sleep(_AGAIN_SECONDS)
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:  # a signal also ends a system call that waits
        signal.pthread_kill(thread, signal.SIGINT)
