"""Memory and CPU limits of a process, with files of Linux control groups."""

from pathlib import Path

import pytest

from paceline.system import machine as system
from paceline.system.machine import cpu_cores, memory_bytes

MACHINE = 16_000_000_000
UNLIMITED = "9223372036854771712"
"""What version 1 says without a limit."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(system, "_machine_bytes", lambda: MACHINE)
    monkeypatch.setattr(system, "_PROC", tmp_path / "cgroup")
    monkeypatch.setattr(system, "_MOUNT", tmp_path / "mount")
    return tmp_path


def write(root: Path, groups: str, **limits: str) -> None:
    """`limits`: path below the mount, with __ for a slash and _DOT_ for a dot -> content."""
    (root / "cgroup").write_text(groups)
    for name, content in limits.items():
        path = root / "mount" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        # A container of version 2 sees its own group at the top.
        ("0::/\n", {"memory_DOT_max": "8000"}, 8000),
        ("0::/\n", {"memory_DOT_max": "max"}, MACHINE),
        # A service: its own limit, and that of the slice around it.
        ("0::/a/b\n", {"a__b__memory_DOT_max": "max", "a__memory_DOT_max": "7000"}, 7000),
        ("0::/a/b\n", {"a__b__memory_DOT_max": "6000", "a__memory_DOT_max": "7000"}, 6000),
        # Version 1: Docker shows the group of the host, and mounts the container's own.
        (
            "3:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n0::/\n",
            {"memory__memory_DOT_limit_in_bytes": "5000", "cpu__memory_DOT_max": "1"},
            5000,
        ),
        ("2:memory:/s\n", {"memory__s__memory_DOT_limit_in_bytes": "4000"}, 4000),
        ("2:memory:/s\n", {"memory__s__memory_DOT_limit_in_bytes": UNLIMITED}, MACHINE),
        ("2:memory:/../..\n", {"memory__memory_DOT_limit_in_bytes": "3000"}, 3000),
        (None, {}, MACHINE),
        ("0::/\n", {"memory_DOT_max": str(2 * MACHINE)}, MACHINE),
        ("", {"memory_DOT_max": "1"}, MACHINE),
        ("nothing that is known\n", {"memory_DOT_max": "1"}, MACHINE),
    ],
)
def test_the_lowest_memory_limit_of_the_groups_applies(
    groups: str | None, limits: dict[str, str], expected: int, root: Path
):
    if groups is not None:
        write(root, groups, **limits)
    assert memory_bytes() == expected


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 8),
        ({"cpu_DOT_max": "max 100000"}, 8),
        ({"cpu_DOT_max": "200000 100000"}, 2),
        ({"cpu_DOT_max": "150000 100000"}, 2),
        ({"cpu_DOT_max": "1000 100000"}, 1),
        ({"cpu_DOT_max": "1600000 100000"}, 8),
        ({"a__cpu_DOT_max": "300000 100000", "a__b__cpu_DOT_max": "max 100000"}, 3),
    ],
)
def test_a_container_quota_limits_the_cpus(
    limits: dict[str, str], expected: int, root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8), raising=False)
    write(root, "0::/a/b\n", **limits)
    assert cpu_cores() == expected
