import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from paceline.errors import ModelError
from paceline.models import gguf, prepare, resolve
from paceline.models.prepare import models_dir
from paceline.storage.workspace import PARTIAL, publish, workspace
from support.errors import raises

Usage = namedtuple("Usage", "total used free")


def partial(folder: Path) -> list[Path]:
    return [*folder.glob(f"{PARTIAL}*")]


@pytest.mark.parametrize(
    "error", [ModelError("no"), KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")]
)
def test_a_failed_workspace_leaves_nothing(error: BaseException, tmp_path: Path):
    expected = ModelError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected), workspace(tmp_path, "m", needed=1) as work:
        (work / "half").write_text("x")
        raise error
    assert not [*tmp_path.iterdir()]


def test_a_workspace_is_published_atomically_and_the_first_one_stays(tmp_path: Path):
    for text in ("first", "second"):
        with workspace(tmp_path, "m", needed=1) as work:
            assert work.parent == tmp_path
            assert not [*work.iterdir()]
            (work / "file").write_text(text)
            publish(work, tmp_path / "m")
        assert [path.name for path in tmp_path.iterdir()] == ["m"]
        assert (tmp_path / "m" / "file").read_text() == "first"


def test_a_disk_without_space_is_detected_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(9, 9, 2_000_000))
    with raises(ModelError, "3.0 MB", "2.0 MB"), workspace(tmp_path, "m", needed=3_000_000):
        pytest.fail("the work began")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError("4 of 8 written"),
    ],
)
def test_a_disk_that_fills_up_during_the_work_is_a_one_line_error(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with (
        raises(ModelError, "m needs 5.0 MB", "$PACELINE_CACHE"),
        workspace(tmp_path / "models", "m", needed=5_000_000) as work,
    ):
        (work / "half").write_text("x")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(9, 9, 4096))
        raise error
    assert not [*(tmp_path / "models").iterdir()]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_cache_folder_that_cannot_be_created_is_a_one_line_error(place: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with raises(ModelError, "file", "$PACELINE_CACHE"), workspace(tmp_path / place, "m", needed=1):
        pytest.fail("the work began")


def test_active_workspaces_stay_and_stale_ones_are_removed(tmp_path: Path):
    old, recent = (tmp_path / f"{PARTIAL}m-{name}" for name in ("old", "recent"))
    for folder in (old, recent):
        folder.mkdir()
    os.utime(old, (0, 0))
    with workspace(tmp_path, "m", needed=1) as work:
        assert {*partial(tmp_path)} == {recent, work}


PULL = """
import sys
from pathlib import Path
from paceline.models import pull
sys.stdin.readline()
print(pull(sys.argv[1], Path(sys.argv[2])).folder)
"""


def test_two_processes_may_pull_the_same_model(tiny_gguf: Path, tmp_path: Path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PULL, str(tiny_gguf), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for child in children:  # both have finished their imports, or soon will
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    told = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0, 0], told
    folders = {Path(out.strip()) for out, _ in told}
    assert len(folders) == 1
    assert [*models_dir(tmp_path).iterdir()] == [*folders]


@pytest.mark.parametrize(
    ("module", "step"), [(gguf, "build_tokenizer"), (prepare, "write_manifest")]
)
def test_an_interrupted_preparation_leaves_nothing(
    module: ModuleType, step: str, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real: Callable[..., object] = getattr(module, step)

    def interrupted(*arguments: object) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve(str(tiny_gguf), tmp_path)
    assert not [*models_dir(tmp_path).iterdir()]
