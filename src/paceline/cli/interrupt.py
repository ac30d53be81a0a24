"""Ctrl-C before a command works and after it has ended: one line, at once.

Imports nothing of ours and little else. While a command works, Ctrl-C is a KeyboardInterrupt, so
that it can clean up; in an import that would be a traceback, and perhaps an error of the package.
"""

import os
import signal
from typing import Any

EXIT = 128 + signal.SIGINT
"""Exit code of a command that was stopped with Ctrl-C."""

LINE = "\npaceline: stopped\n"


def stop_at_once() -> None:
    """From now on Ctrl-C ends the process without a cleanup."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def stop_by_exception() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an error comes from Ctrl-C.

    In an import, a compiled package makes an ImportError of it, and Python 3.11 a RuntimeError
    where it names the attributes of a class.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _stop(*_: Any) -> None:
    os.write(2, LINE.encode())
    os._exit(EXIT)
