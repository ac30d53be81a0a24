"""The cache folder: where prepared models live and how a new one gets there.

Knows folders, locks and free space. Knows nothing about what is inside a model. The rule: a model's
folder appears whole, by one rename, or not at all; whatever goes wrong, nothing half-made stays.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import ModelError

CACHE_VARIABLE = "PACELINE_CACHE"
PARTIAL = ".partial-"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_BYTES = 1 << 20
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)


def cache_dir() -> Path:
    """The folder that holds everything paceline fetches: $PACELINE_CACHE, or the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("paceline")


def models_dir(cache: Path | None) -> Path:
    """The folder of prepared models inside `cache` (None: the usual cache folder)."""
    return (cache_dir() if cache is None else cache) / "models"


def megabytes(count: int) -> str:
    """`count` bytes as people read them."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextlib.contextmanager
def workspace(parent: Path, name: str, *, needed: int) -> Iterator[Path]:
    """A new empty folder in `parent` to make `name` in; gone at the end unless published.

    `needed` is how many bytes the work takes at its peak, at least. Left-overs of processes that
    no longer run are removed first. Raises ModelError when the disk has not the room or the folder
    cannot be written; an OSError of the body is reported the same way, in one line.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        if shutil.disk_usage(parent).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
        with _locked_folder(parent, name) as work:
            try:
                yield work
            except (OSError, ModelError) as error:
                # Those who write for us seldom say why they could not.
                if shutil.disk_usage(parent).free < _NO_ROOM_BYTES:
                    raise disk_full() from error
                raise
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise ModelError(_full(parent, name, needed)) from error
        raise ModelError(
            f"cannot make {name} in {parent}: {error.filename or parent}: "
            f"{error.strerror or error}; choose another folder with ${CACHE_VARIABLE}"
        ) from error


def publish(work: Path, final: Path, *, replace: bool) -> None:
    """Give the finished folder `work` its name `final`, in one rename.

    Where `final` exists already (another process was first) it is kept and `work` is dropped,
    unless `replace`. Both must be in the same folder. Raises OSError.
    """
    while True:
        try:
            work.rename(final)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            if not replace:
                return
            _remove_whole(final)
        else:
            return


def disk_full() -> OSError:
    """The error to raise when a child process reports a full disk; `workspace` words it."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _full(parent: Path, name: str, needed: int) -> str:
    try:
        free = f", which has {megabytes(shutil.disk_usage(parent).free)}"
    except OSError:
        free = ""
    return (
        f"the disk is full: {name} needs {megabytes(needed)} ({needed} bytes) free in "
        f"{parent}{free}; free some space or choose another folder with ${CACHE_VARIABLE}"
    )


@contextlib.contextmanager
def _locked_folder(parent: Path, name: str) -> Iterator[Path]:
    """A new folder whose lock this process holds, so that nobody takes it for abandoned."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{name}-{os.getpid()}-", dir=parent))
        handle = _lock(work, wait=True)
        if handle is None or work.exists():
            break
        os.close(handle)  # removed between its making and its locking: make another
    try:
        yield work
    finally:
        if handle is not None:
            os.close(handle)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """A handle that holds the folder's lock, or None when it cannot be had."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by another process, or a file system without locks
        os.close(handle)
        return None
    return handle


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PARTIAL}*"):
        handle = _lock(folder, wait=False)
        if handle is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _remove_whole(folder: Path) -> None:
    """Take `folder` out of sight in one rename, then delete it."""
    doomed = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):  # another process removed it first
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
