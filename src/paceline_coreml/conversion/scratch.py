"""The temporary folder of a conversion.

coremltools writes every package several times to the folder of `tempfile`, and removes them only
when the process ends. Invariant: all of that is in one folder, and the next conversion removes the
folder of one that was killed.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import ModelError
from paceline.storage.files import megabytes, remove
from paceline.storage.workspace import full_disk
from paceline.system.machine import lock_path

_PREFIX = ".paceline-coreml-scratch-"

TEMPORARY, OUTPUT = "--temporary", "--output"
"""The options that choose another folder."""

_NO_ROOM_BYTES = 1 << 20


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in `parent`, or in the system's, that is `tempfile`'s in the body."""
    place, before = parent or Path(tempfile.gettempdir()), tempfile.tempdir
    for left in place.glob(f"{_PREFIX}*"):
        if left.is_dir() and (release := lock_path(left, wait=False)) is not None:
            remove(left)
            release()
    made = Path(tempfile.mkdtemp(dir=place))
    release = lock_path(made, wait=False)
    # Other processes see the folder once it is locked.
    work = made.rename(place / f"{_PREFIX}{made.name}")
    tempfile.tempdir = str(work)
    try:
        yield work
    except Exception as error:  # libraries seldom report a full disk as such
        if (free := shutil.disk_usage(work).free) < _NO_ROOM_BYTES:
            raise ModelError(
                f"the disk is full: {place} has {megabytes(free)} free; free some space or choose "
                f"another folder with {TEMPORARY}"
            ) from error
        raise
    finally:
        tempfile.tempdir = before
        shutil.rmtree(work, ignore_errors=True)
        if release is not None:
            release()


def check_space(folder: Path, what: str, needed: int, option: str) -> None:
    """Raise ModelError if a folder, chosen with `option`, has less than `needed` bytes free."""
    if shutil.disk_usage(folder).free < needed:
        folder = folder.parent if folder.name.startswith(_PREFIX) else folder
        raise ModelError(full_disk(folder, what, needed, option))
