"""Downloads large files of a repository into the hub's cache, and resumes what was interrupted.

huggingface_hub 2 deletes the part of a file that an interrupted download leaves. So the part is
kept here, beside the hub's blobs and under the name that earlier versions used, and huggingface_hub
makes the snapshot of the finished blob. Invariant: a blob appears whole, with its published
checksum, or not at all; nothing is requested before the disk has room for everything.
"""

import contextlib
import errno
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from paceline.errors import ModelError
from paceline.models import hub
from paceline.models.hub import HubFile, Repository
from paceline.storage.files import megabytes, sha256_of
from paceline.storage.progress import Progress, Update

_LARGEST = 50_000_000_000
"""Bytes. The hub sends larger files only through huggingface_hub's own protocol (Xet)."""


def download(
    repository: Repository, paths: Sequence[str], revision: str | None, progress: Progress
) -> Path:
    """Bring files of a repository into the hub's cache; returns the path of the first.

    Args:
        repository: where the files are.
        paths: the files, all of which it has.
        revision: what the user calls the repository's commit; None: the main branch.
        progress: shows the bytes of all files together.

    Raises:
        ModelError: too little disk, terms not accepted, an interrupted connection, other bytes than
            the published ones.
    """
    from huggingface_hub import hf_hub_download

    with hub.errors_of(repository.name):
        check_disk(repository.name, missing_bytes(repository, paths))
        absent = {path: repository.files[path] for path in paths if not _is_here(repository, path)}
        total = sum(file.bytes for file in absent.values())
        if absent:
            label = f"fetching {repository.name} ({megabytes(total)})"
            with _without_bars(progress), progress.task(label, total) as update:
                done = 0
                for path, file in absent.items():
                    _fetch_blob(repository, path, _from(done, update))
                    done += file.bytes
        local_paths = [hf_hub_download(repository.name, path, revision=revision) for path in paths]
        return Path(local_paths[0])


def missing_bytes(repository: Repository, paths: Sequence[str]) -> int:
    """Bytes of the files that are not in the hub's cache yet."""
    absent = [repository.files[path] for path in paths if not _is_here(repository, path)]
    return sum(
        file.bytes - min(file.bytes, _part_bytes(_blob(repository, file))) for file in absent
    )


def check_disk(name: str, needed: int) -> None:
    """Raise ModelError if the hub's cache has not `needed` bytes free."""
    folder = hub.cache_folder()
    free = shutil.disk_usage(_existing(folder)).free
    if needed > free:
        raise ModelError(
            f"the disk is full: {name} needs {megabytes(needed)} ({needed} bytes) free in "
            f"{folder}, which has {megabytes(free)}; free some space or choose another folder with "
            "$HF_HOME"
        )


def _from(begin: int, update: Update) -> Update:
    """Callback for a part of the work that begins at `begin`."""
    return lambda done: update(begin + done)


def _fetch_blob(repository: Repository, path: str, update: Update) -> None:
    """Download one file to its blob, from where the last attempt ended.

    Raises ModelError, which says how much is here.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        WeakFileLock,
        build_hf_headers,
    )

    file = repository.files[path]
    if file.sha256 is None or file.bytes > _LARGEST:
        return  # left to huggingface_hub
    blob = _blob(repository, file)
    part = _part(blob)
    blob.parent.mkdir(parents=True, exist_ok=True)
    locks = hub.cache_folder() / ".locks" / blob.parent.parent.name
    locks.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(locks / f"{file.sha256}.lock"):
        if blob.exists():  # another process fetched it meanwhile
            return
        begin = _part_bytes(blob)
        if begin > file.bytes:
            part.unlink()
            begin = 0
        update(begin)
        with part.open("r+b" if begin else "wb") as sink:
            sink.seek(begin)
            try:
                http_get(
                    hf_hub_url(repository.name, path, revision=repository.commit),
                    cast("BinaryIO", _Counted(sink, update)),
                    resume_size=begin,
                    # A compressed answer has no ranges.
                    headers=build_hf_headers(headers={"Accept-Encoding": "identity"}),
                    expected_size=file.bytes,
                    displayed_filename=path,
                )
            except HfHubHTTPError:
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise
                raise _interrupted(repository.name, sink.tell(), file.bytes) from error
        if (digest := sha256_of(part)) != file.sha256:
            part.unlink()
            raise ModelError(
                f"{repository.name}/{path} is not the file that was published: SHA-256 is "
                f"{digest}, expected {file.sha256}; nothing was kept, try again"
            )
        part.rename(blob)


class _Counted:
    """A file that reports how much of it there is; huggingface_hub writes a download into it."""

    def __init__(self, file: BinaryIO, update: Update) -> None:
        self._file, self._update = file, update

    def write(self, data: bytes) -> int:
        """Append `data`; returns the bytes written."""
        count = self._file.write(data)
        self._update(self._file.tell())
        return count

    def seek(self, offset: int) -> int:
        """Go to `offset`; returns it."""
        return self._file.seek(offset)

    def tell(self) -> int:
        """Bytes before the position."""
        return self._file.tell()

    def truncate(self) -> int:
        """Remove what is after the position; returns the size."""
        return self._file.truncate()


@contextlib.contextmanager
def _without_bars(progress: Progress) -> Iterator[None]:
    """Turn off huggingface_hub's own progress bars in the body, and after it if none are shown."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    is_free = constants.HF_HUB_DISABLE_PROGRESS_BARS is None  # else the user has decided
    if is_free:
        disable_progress_bars()
    try:
        yield
    finally:
        if is_free and progress.is_shown:
            enable_progress_bars()


def _interrupted(name: str, done: int, total: int) -> ModelError:
    kept = f"{megabytes(done)} of {megabytes(total)} are kept" if done else "nothing was fetched"
    return ModelError(
        f"cannot fetch {name}: the connection to the Hugging Face hub was lost; {kept}, and the "
        "same command goes on from there"
    )


def _is_here(repository: Repository, path: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(repository.name, path, revision=repository.commit), str):
        return True
    return _blob(repository, repository.files[path]).exists()


def _blob(repository: Repository, file: HubFile) -> Path:
    """Where the hub's cache has the content of a file; the folder of blobs for one in git."""
    name = "--".join(("models", *repository.name.split("/")))
    folder = hub.cache_folder() / name / "blobs"
    return folder / file.sha256 if file.sha256 else folder / "in-git"


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _part_bytes(blob: Path) -> int:
    try:
        return _part(blob).stat().st_size
    except OSError:
        return 0


def _existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
