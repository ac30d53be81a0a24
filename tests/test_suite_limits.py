"""The test suite itself: no test can hang for ever."""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from support.pairs import pairs
from support.scripts import ROOT
from support.waiting import PATIENCE


def test_every_test_has_a_timeout(request: pytest.FixtureRequest):
    config = request.config
    assert float(config.getini("timeout")) <= 300
    assert config.getini("faulthandler_exit_on_timeout")


def test_a_test_that_waits_for_ever_fails_at_its_timeout(tmp_path: Path):
    path = tmp_path / "test_waits.py"
    path.write_text("import time\n\ndef test_waits():\n    time.sleep(3600)\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "--timeout", "1"]
    ended = subprocess.run(
        [*command, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name},
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    assert "Timeout" in ended.stdout


def test_any_two_values_of_different_axes_meet_in_a_row_of_pairs():
    axes = ["abcde", range(4), "xyz", (True, False)]
    rows = pairs(*axes)
    for (i, one), (j, other) in combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == {*product(one, other)}
    assert len(rows) <= 22  # of 120; the two longest axes alone need 20
    assert rows == pairs(*axes)
