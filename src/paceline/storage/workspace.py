"""Folders that are made whole: free space, atomic publishing.

Invariant: a folder appears complete, by one rename, or not at all; failures and crashes leave no
partial one.
"""

import contextlib
import errno
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import ModelError
from paceline.storage.files import megabytes, remove
from paceline.system.machine import CACHE_VARIABLE

PARTIAL = ".partial-"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_BYTES = 1 << 20
_ABANDONED_SECONDS = 24 * 3600


@contextlib.contextmanager
def workspace(parent: Path, name: str, *, needed: int) -> Iterator[Path]:
    """Yield a new empty folder in `parent` for making `name`; deleted at the end unless published.

    What killed processes left a day ago is removed first. `needed` is the peak disk use in bytes.
    Raises ModelError when the disk has less free or the folder cannot be written; an OSError of the
    body becomes a ModelError too.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        if shutil.disk_usage(parent).free < needed:
            raise _no_space()
        work = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{name}-", dir=parent))
        try:
            yield work
        except (OSError, ModelError) as error:
            # Libraries seldom report a full disk as such.
            if shutil.disk_usage(parent).free < _NO_ROOM_BYTES:
                raise _no_space() from error
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise ModelError(full_disk(parent, name, needed, f"${CACHE_VARIABLE}")) from error
        raise ModelError(
            f"cannot create {name} in {parent}: {error.filename or parent}: "
            f"{error.strerror or error}; choose another folder with ${CACHE_VARIABLE}"
        ) from error


def publish(work: Path, final: Path) -> None:
    """Rename the finished folder `work` to `final`, atomically; both are in the same folder.

    An existing `final` is kept, as another process was first. Raises OSError.
    """
    try:
        work.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _no_space() -> OSError:
    return OSError(errno.ENOSPC, "no room")


def full_disk(parent: Path, name: str, needed: int, setting: str) -> str:
    """Return the error's message; `setting` chooses another folder."""
    try:
        free = f", which has {megabytes(shutil.disk_usage(parent).free)}"
    except OSError:
        free = ""
    return (
        f"the disk is full: {name} needs {megabytes(needed)} ({needed} bytes) free in "
        f"{parent}{free}; free some space or choose another folder with {setting}"
    )


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{PARTIAL}*"):
        with contextlib.suppress(FileNotFoundError, ModelError):  # another process published it
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                remove(path)
