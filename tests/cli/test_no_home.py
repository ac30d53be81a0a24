"""Commands without a home folder, or with a read-only one."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.fake_hub import serving
from support.waiting import PATIENCE

NO_ENTRY = """
import pwd, sys
def nobody(*_):
    raise KeyError("uid not found")
pwd.getpwuid = pwd.getpwnam = nobody
from paceline.__main__ import main
sys.exit(main())
"""
"""A command of a user who has no entry in the table of users."""

HOMES = {
    "none": {},
    "no folder": {"HOME": os.devnull},
    "cache": {"PACELINE_CACHE": f"{os.devnull}/cache", "HF_HOME": f"{os.devnull}/hub"},
}


@pytest.fixture(params=HOMES)
def homeless(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Runs a command; its error is one line without a traceback."""
    environment = {"OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", **HOMES[request.param]}

    def run(*arguments: object, code: int = 0, **variables: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", NO_ENTRY, *map(str, arguments)],
            env={**environment, **variables},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert not [*tmp_path.iterdir()], "nothing in the current folder"
        return done

    return run


def test_a_read_only_home_allows_model_paths_and_names_the_cache_variable(
    homeless: Callable[..., Any], tiny_gguf: Path
):
    answer = homeless("generate", "Hello", "-n", 4, "--keep", "--model", tiny_gguf)
    assert answer.stdout.strip()
    notes = [line for line in answer.stderr.splitlines() if "$PACELINE_CACHE" in line]
    assert [re.split("[,:]", note)[0] for note in notes] == [
        f"{tiny_gguf.name} is read again by each command",
        "answers are not saved",
    ]
    refused = homeless("pull", "smollm2-135m", code=2).stderr.splitlines()
    assert refused[-1].startswith("paceline: cannot create smollm2-135m")
    assert "$PACELINE_CACHE" in refused[-1]
    assert homeless("models").stdout


def test_a_failed_hugging_face_download_names_the_cache_variable(homeless: Callable[..., Any]):
    with serving() as fake:
        fake.add("owner/tiny", "tiny-Q8_0.gguf")
        found = homeless("pull", "owner/tiny", code=2, HF_ENDPOINT=fake.url)
    assert "paceline: cannot store owner/tiny" in found.stderr
    assert "choose another folder with $HF_HOME" in found.stderr
