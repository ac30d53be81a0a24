"""How much memory this process may use: the machine's, or less in a container.

A container's limit is a file of its control group. The limits of the groups around it hold too, so
the least counts. Layouts: the kernel's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from paceline.system import physical_memory

_PROC, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""Controllers of a line of /proc/self/cgroup (none: version 2) -> file of the limit."""


def memory_bytes() -> int:
    """Memory that this process may use, in bytes: the machine's, or its container's limit."""
    return min([physical_memory(), *_limits()])


def _limits() -> Iterator[int]:
    """Limits of this process's control groups, in bytes; those that cannot be read are left out."""
    try:
        lines = _PROC.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, group = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(",") if number.isdecimal() else ():
            if controller in _LIMITS:
                yield from _limits_of(_MOUNT / controller, group, _LIMITS[controller])


def _limits_of(mount: Path, group: str, name: str) -> Iterator[int]:
    """Limits of a group and those around it.

    A container sees its own group at the top of the mount, whatever its name is outside; a group
    that is not there is left out.
    """
    path = PurePosixPath(group.lstrip("/"))
    for part in (path, *path.parents):
        try:
            yield int((mount / part / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing, or max
            continue
