"""Downloads files of a repository into the Hugging Face cache, and resumes partial downloads.

huggingface_hub 2 deletes the part of a file that an interrupted download leaves. So this module
stores the part next to the Hub's blobs, under the name that earlier versions used;
huggingface_hub makes the snapshot of the finished blob. Invariant: a blob appears whole, with its
published checksum, or not at all; nothing is requested before the disk has room for everything.
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
"""Bytes. The Hub sends larger files only through huggingface_hub's own protocol (Xet)."""


def download(
    repository: Repository, paths: Sequence[str], revision: str | None, progress: Progress
) -> Path:
    """Download files of a repository into the Hugging Face cache; return the path of the first.

    `revision` is the user's name of the repository's commit; None: the main branch. Raises
    ModelError: too little disk space, terms not accepted, an interrupted connection, or a
    checksum that differs from the published one.
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
            label = f"downloading {repository.name} ({megabytes(total)})"
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
    """Download the files of a set and return their folder. Raises the errors of `download`."""
    if missing := [path for path in files.required if path not in repository.files]:
        raise ModelError(
            f"{repository.name} has no {', '.join(missing)} on the Hub, so it is not {files.kind}"
        )
    paths = dict.fromkeys(files.required)
    for pattern in files.patterns:
        paths |= dict.fromkeys(matching(repository.files, pattern))
    return download(repository, [*paths], revision, progress).parent


def _check_disk(name: str, needed: int) -> None:
    """Raise ModelError if the Hugging Face cache lacks `needed` bytes of free disk."""
    folder = hub.cache_folder()
    if folder.parts[0] == "~":
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", str(folder))
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if needed > shutil.disk_usage(existing).free:
        raise ModelError(full_disk(existing, name, needed, "$HF_HOME"))


def _fetch_blob(repository: Repository, path: str, update: Update, done: int) -> None:
    """Download a file, after `done` bytes of others, resuming the last attempt."""
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
        if blob.exists():  # another process downloaded it in the meantime
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
                    # A compressed response has no ranges.
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
                f"{repository.name}/{path} is not the published file: SHA-256 is "
                f"{digest}, expected {file.sha256}; nothing was saved, try again"
            )
        part.rename(blob)


class _Counted(io.BufferedRandom):
    """A file that reports its size as huggingface_hub writes a download into it."""

    update: Update
    before: int
    """Bytes of other files."""

    def write(self, data: Any) -> int:
        """Append `data` and return the bytes written."""
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
    saved = f"{megabytes(done)} of {megabytes(total)} are saved" if done else "nothing was saved"
    return ModelError(
        f"cannot download {name}: the connection to the Hugging Face Hub was lost; {saved}; run "
        "the same command to continue"
    )


def _is_here(repository: Repository, path: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(repository.name, path, revision=repository.commit), str):
        return True
    return _blob(repository, repository.files[path]).exists()


def _blob(repository: Repository, file: HubFile) -> Path:
    """Return the cached content of a file; for a file in git, the folder of blobs."""
    folder = hub.folder_of(repository.name) / "blobs"
    return folder / file.sha256 if file.sha256 else folder / "in-git"


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _part_bytes(repository: Repository, file: HubFile) -> int:
    """Return the bytes of a partial download that exist and may count."""
    try:
        return min(_part(_blob(repository, file)).stat().st_size, file.bytes)
    except OSError:
        return 0
