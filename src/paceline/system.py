"""What operating systems do not have in common: the only place for calls that some lack.

`mypy --platform win32` finds such calls elsewhere. One script has its own, the renderer of chat
templates (`models/template_worker.py`), which starts without importing paceline.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

BROKEN_PIPE_EXIT = 128 + 13
"""Exit code of a command whose output was closed: as if ended by SIGPIPE."""

ALARM_EXIT = -14
"""Return code of a child that was ended by SIGALRM, at its deadline."""

HAS_ALARM = sys.platform != "win32"
"""Whether a process can have itself ended at a deadline."""

_OPEN_FILES = 10_240
"""File descriptors: the most that macOS allows without a limit."""

Release = Callable[[], None]
"""Gives a lock back."""


def lock_folder(folder: Path, *, wait: bool) -> Release | None:
    """Lock a folder against other processes, until it is released or this process ends.

    Returns None where it is locked by another process, or cannot be locked.
    """
    if (
        sys.platform == "win32"
    ):  # which cannot lock a folder, nor rename one with an open file in it
        from filelock import FileLock, Timeout

        lock = FileLock(folder.with_name(f"{folder.name}.lock"))
        try:
            lock.acquire(blocking=wait)
        except (OSError, Timeout):
            return None
        release: Release = lock.release
        return release
    import fcntl

    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by another process, or a file system without locks
        os.close(handle)
        return None
    return lambda: os.close(handle)


def allow_open_files() -> None:
    """Raise the limit on open files: some shells allow 256, and a connection takes one."""
    if sys.platform != "win32":  # where sockets do not count
        import resource

        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        new = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
        if now != resource.RLIM_INFINITY and now < new:
            resource.setrlimit(resource.RLIMIT_NOFILE, (new, most))


def on_stop_signal(loop: asyncio.AbstractEventLoop, handle: Callable[[], None]) -> None:
    """Call `handle` in a running loop at SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if sys.platform == "win32":  # its loops have no signal handlers
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(handle))
        else:
            loop.add_signal_handler(number, handle)


def physical_memory() -> int:
    """Memory of the machine, in bytes."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.virtual_memory().total)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def drop_pages(file: BinaryIO) -> None:
    """Have the next reader of an open file read it from the disk, where the system allows it."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.fsync(file.fileno())  # pages that are not written cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
