"""The test suite itself: no test can hang for ever."""

import os
import signal
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from support.pairs import pairs
from support.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
WAITING = "import time; print('here', flush=True); time.sleep(3600)"


def run_pytest(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run pytest with the project's settings in a process that ignores SIGINT."""
    script = "trap '' INT; exec \"$@\""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    return subprocess.run(
        [
            "sh",
            "-c",
            script,
            "sh",
            *command,
            "-c",
            str(ROOT / "pyproject.toml"),
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if "PYTEST" not in name},
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        },
    )


def test_every_test_has_a_timeout(request: pytest.FixtureRequest):
    config = request.config
    assert float(config.getini("timeout")) <= 300
    assert config.getini("faulthandler_exit_on_timeout")


def test_a_test_that_waits_for_ever_fails_at_its_timeout(tmp_path: Path):
    path = tmp_path / "test_waits.py"
    path.write_text("import time\n\ndef test_waits():\n    time.sleep(3600)\n")
    ended = run_pytest("-p", "no:xdist", "--timeout", 1, "--rootdir", tmp_path, path)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    assert "Timeout" in ended.stdout


def test_a_crash_of_a_worker_is_named_and_ends_the_run(tmp_path: Path):
    crash = "import os\n\ndef test_crashes():\n    os._exit(3)\n"
    (tmp_path / "test_crashes.py").write_text(crash + "\ndef test_after():\n    pass\n")
    for number in range(4):
        (tmp_path / f"test_{number}.py").write_text("def test_passes():\n    pass\n")
    workers = ("-p", "conftest", "-n", 2, "--dist", "loadfile")
    ended = run_pytest(*workers, "--rootdir", tmp_path, tmp_path)
    assert ended.returncode != pytest.ExitCode.OK
    assert "crashed while running 'test_crashes.py::test_crashes'" in ended.stdout


def test_sigint_ends_a_child_process():
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"here\n"
            child.send_signal(signal.SIGINT)
            child.wait(10)
        finally:
            child.kill()


def test_sigint_ends_a_child_process_where_the_shell_ignores_sigint():
    ended = run_pytest("-p", "no:xdist", f"{__file__}::{test_sigint_ends_a_child_process.__name__}")
    assert ended.returncode == pytest.ExitCode.OK, ended.stdout + ended.stderr


def test_any_two_values_of_different_axes_meet_in_a_row_of_pairs():
    axes = ["abcde", range(4), "xyz", (True, False)]
    rows = pairs(*axes)
    for (i, one), (j, other) in combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == {*product(one, other)}
    assert len(rows) <= 22  # of 120; the two longest axes alone need 20
    assert rows == pairs(*axes)
