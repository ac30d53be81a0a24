"""The operating system: this process's resources, and the only place for calls that some lack.

`mypy --platform win32` finds such calls elsewhere. `guarded.py` has its own: it is a
script that starts without importing paceline.

A container's limits of memory and CPU time are files of its control group. The limits of the
groups around it hold too, so the least counts. Layouts: the kernel's admin-guide/cgroup-v2.rst and
cgroup-v1/memory.rst.
"""

import ipaddress
import os
import platform
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

CACHE_VARIABLE = "PACELINE_CACHE"

NO_FOLDER = Path(os.devnull, "no-home-folder")
"""A path below which there is nothing, and nothing can be made."""

BROKEN_PIPE_EXIT = 128 + 13
"""Exit code of a command whose output was closed: as if ended by SIGPIPE."""

ALARM_EXIT = -27
"""Return code of a child that was ended at its deadline, by SIGPROF."""

HAS_ALARM = sys.platform != "win32"
"""Whether a process can have itself ended at a deadline."""

_OPEN_FILES = 10_240
"""File descriptors: the most that macOS allows without a limit."""

_LOWEST_PRIORITY = 19

_PROC, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_MEMORY, _CPU = {"": "memory.max", "memory": "memory.limit_in_bytes"}, {"": "cpu.max"}
_QUOTA = re.compile(r"(\d+) ([1-9]\d*)")  # microseconds per period; without a limit "max"
"""Controllers of a line of /proc/self/cgroup (none: version 2) -> file of the limit."""

Release = Callable[[], None]


def cache_dir() -> Path:
    """Folder of what paceline fetches, makes and measures: $PACELINE_CACHE, or the user's cache.

    `NO_FOLDER`, where nothing can be made, for a user without a home, or who may not enter it.
    """
    from platformdirs import user_cache_path

    try:
        chosen = os.environ.get(CACHE_VARIABLE)
        folder = Path(chosen).expanduser() if chosen else user_cache_path("paceline")
        folder.exists()
    except (OSError, RuntimeError):
        return NO_FOLDER
    return folder


def release_memory() -> None:
    """Give freed memory back to the system, where its allocator keeps it (glibc's does)."""
    import ctypes

    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def lock_path(path: Path, *, wait: bool) -> Release | None:
    """Lock a file or folder against other processes, until it is released or this process ends.

    Returns None where it is locked by another process, or cannot be locked.
    """
    # Windows locks no folders, and none can be renamed while a file in it is open.
    if sys.platform == "win32":
        from filelock import FileLock, Timeout

        lock = FileLock(path.with_name(f"{path.name}.lock"))
        try:
            lock.acquire(blocking=wait)
        except (OSError, Timeout):
            return None
        release: Release = lock.release
        return release
    import fcntl

    try:
        handle = os.open(path, os.O_RDONLY)
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

        now, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
        new = _OPEN_FILES if maximum == resource.RLIM_INFINITY else min(maximum, _OPEN_FILES)
        if now != resource.RLIM_INFINITY and now < new:
            resource.setrlimit(resource.RLIMIT_NOFILE, (new, maximum))


def free_descriptors() -> int | None:
    """File descriptors that this process may still open; None where nothing limits sockets."""
    if sys.platform == "win32":
        return None
    import resource

    maximum = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if maximum == resource.RLIM_INFINITY:
        return None
    return maximum - sum(1 for _ in Path("/dev/fd").iterdir())


@contextmanager
def stop_signals(handle: Callable[[], None]) -> Iterator[None]:
    """Meanwhile SIGTERM and SIGINT call `handle` in a thread. For the main thread.

    A handler in the main thread would wait for what that does, and it may hang.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def wait() -> None:
        with receiver:
            while receiver.recv(1):
                handle()

    threading.Thread(target=wait, name="paceline-signals", daemon=True).start()
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        sender.close()


def memory_bytes() -> int:
    """Memory that this process may use, in bytes: the machine's, or its container's limit."""
    return min([_machine_bytes(), *(int(text) for text in _limits(_MEMORY) if text.isdecimal())])


def cpu_cores() -> int:
    """Return the number of CPUs that this process may use, rounded up from a container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = map(_QUOTA.fullmatch, _limits(_CPU))
    return min([cores, *(-(-int(quota[1]) // int(quota[2])) for quota in quotas if quota)])


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def direct_hosts() -> str:
    """Return the value of NO_PROXY with the loopback addresses in it."""
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = (*filter(None, listed.split(",")), "localhost", "127.0.0.1", "::1")
    return ",".join(dict.fromkeys(hosts))


def load_average() -> float:
    """Return the machine's load of the last minute; 0 where it is not measured."""
    if sys.platform == "win32":
        return 0.0
    return os.getloadavg()[0]


def may_have_gpu() -> bool:
    """Return whether this machine may have a GPU; True if the system cannot tell."""
    names = ("nvidia[0-9]*", "dri/renderD*", "kfd", "dxg")
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in names)


def gpu_drivers() -> str:
    """Return the versions and builds of GPU drivers: NVIDIA's and the kernel's."""
    with suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").strip()
    return f"{platform.release()} {platform.version()}"


def processor() -> str:
    """Name of the processor, as far as the system has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _machine_bytes() -> int:
    if sys.platform == "win32":
        import psutil

        return int(psutil.virtual_memory().total)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(files: Mapping[str, str]) -> Iterator[str]:
    """Yield the readable limits of this process's control groups."""
    try:
        lines = _PROC.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, group = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(",") if number.isdecimal() else ():
            if controller in files:
                yield from _limits_of(_MOUNT / controller, group, files[controller])


def _limits_of(mount: Path, group: str, name: str) -> Iterator[str]:
    """Limits of a group and those around it.

    A container sees its own group at the top of the mount, whatever its name is outside; a group
    that is not there is left out.
    """
    path = PurePosixPath(group.lstrip("/"))
    for part in (path, *path.parents):
        with suppress(OSError, ValueError):
            yield (mount / part / name).read_text(encoding="utf-8").strip()


def lower_priority() -> None:
    """Lower this process's priority, including threads started later."""
    if sys.platform == "win32":
        import psutil

        psutil.Process().nice(psutil.IDLE_PRIORITY_CLASS)
    else:
        with suppress(OSError):
            os.nice(_LOWEST_PRIORITY)


@contextmanager
def unseen_keys() -> Iterator[None]:
    """While the body runs, the terminal shows no keys, and holds them one by one.

    A held line could not be longer than 4,095 bytes, and Ctrl-C would drop it.
    """
    if sys.platform == "win32":
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    mode = termios.tcgetattr(descriptor)
    mode[0] &= ~termios.ICRNL
    mode[3] = mode[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
    termios.tcsetattr(descriptor, termios.TCSANOW, mode)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
