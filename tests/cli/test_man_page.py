"""The man page in deploy/ matches the current commands."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.scripts import ROOT, script

PAGE: Path = ROOT / "deploy/paceline.1"


def test_the_man_page_matches_the_current_help():
    made = script("man_page", ROOT / "deploy").man_page()
    assert PAGE.read_text() == made, "run `python deploy/man_page.py`"


def test_the_man_page_is_valid_roff():
    mandoc = shutil.which("mandoc")
    if mandoc is None:
        pytest.skip("mandoc is not installed")
    words = [mandoc, "-Tlint", "-W", "error", PAGE]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
