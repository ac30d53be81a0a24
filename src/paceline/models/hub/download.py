"""Downloads files of a repository into the hub's cache, and resumes what was interrupted.

huggingface_hub 2 deletes the part of a file that an interrupted download leaves. So the part is
kept here, beside the hub's blobs and under the name that earlier versions used, and huggingface_hub
makes the snapshot of the finished blob. Invariant: a blob appears whole, with its published
checksum, or not at all; nothing is requested before the disk has room for everything.
"""

import contextlib
import errno
import io
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

from paceline.errors import ModelError
from paceline.models import hub
from paceline.models.hub import FileSet, HubFile, Repository
from paceline.storage.files import megabytes, sha256_of
from paceline.storage.progress import Progress, Update
from paceline.storage.workspace import full_disk

_LARGEST = 50_000_000_000
"""Bytes. The hub sends larger files only through huggingface_hub's own protocol (Xet)."""


def download(
    repository: Repository, paths: Sequence[str], revision: str | None, progress: Progress
) -> Path:
    """Bring files of a repository into the hub's cache; returns the path of the first.

    `revision` is what the user calls the repository's commit; None: the main branch. Raises
    ModelError: too little disk, terms not accepted, an interrupted connection, other bytes than the
    published ones.
    """
    from huggingface_hub import hf_hub_download

    with hub.errors_of(repository.name), _without_bars(progress):
        absent = {path: repository.files[path] for path in paths if not _is_here(repository, path)}
        _check_disk(
            repository.name,
            sum(file.bytes - _part_bytes(repository, file) for file in absent.values()),
        )
        if absent:
            total = sum(file.bytes for file in absent.values())
            label = f"fetching {repository.name} ({megabytes(total)})"
            with progress.task(label, total) as update:
                done = 0
                for path, file in absent.items():
                    _fetch_blob(repository, path, update, done)
                    done += file.bytes
        local_paths = [hf_hub_download(repository.name, path, revision=revision) for path in paths]
        return Path(local_paths[0])


def fetch_files(
    repository: Repository, files: FileSet, revision: str | None, progress: Progress
) -> Path:
    """Bring the files of a set into the hub's cache; returns their folder. Raises as `download`."""
    if missing := [path for path in files.required if path not in repository.files]:
        raise ModelError(
            f"{repository.name} has no {', '.join(missing)} on the hub, so it is not {files.kind}"
        )
    paths = dict.fromkeys(files.required)
    for pattern in files.patterns:
        paths |= dict.fromkeys(matching(repository.files, pattern))
    return download(repository, [*paths], revision, progress).parent


def _check_disk(name: str, needed: int) -> None:
    """Raise ModelError if the hub's cache has not `needed` bytes free."""
    folder = hub.cache_folder()
    if folder.parts[0] == "~":
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", str(folder))
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if needed > shutil.disk_usage(existing).free:
        raise ModelError(full_disk(existing, name, needed, "HF_HOME"))


def _fetch_blob(repository: Repository, path: str, update: Update, done: int) -> None:
    """Download a file, after others of `done` bytes, from where the last attempt ended."""
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
        begin = part.stat().st_size if part.exists() else 0
        if begin > file.bytes:
            begin = 0
        update(done + begin)
        with _Counted(io.FileIO(part, "r+" if begin else "w+")) as sink:
            sink.update, sink.before = update, done
            sink.seek(begin)
            try:
                http_get(
                    hf_hub_url(repository.name, path, revision=repository.commit),
                    sink,
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


class _Counted(io.BufferedRandom):
    """A file that reports how much of it there is; huggingface_hub writes a download into it."""

    update: Update
    before: int
    """Bytes of other files."""

    def write(self, data: Any) -> int:
        """Append `data`; returns the bytes written."""
        count = super().write(data)
        self.update(self.before + self.tell())
        return count


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
    folder = hub.folder_of(repository.name) / "blobs"
    return folder / file.sha256 if file.sha256 else folder / "in-git"


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _part_bytes(repository: Repository, file: HubFile) -> int:
    """Bytes of an interrupted download that are here, and may count."""
    try:
        return min(_part(_blob(repository, file)).stat().st_size, file.bytes)
    except OSError:
        return 0
