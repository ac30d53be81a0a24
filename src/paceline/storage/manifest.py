"""Artifacts of paceline's commands: folders with a `manifest.json` that names kind and files.

Independent of the files' contents.
"""

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from paceline.errors import InvalidRequest, ModelError
from paceline.storage.files import digest_of, read_json, sha256_of, write_json, writing
from paceline.storage.validation import Count, Limit, list_faults, validated
from paceline.system.machine import cache_dir

MANIFEST = "manifest.json"

_MAX_MARKS = 1000
"""Artifacts that are remembered as unchanged."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file when the manifest was written."""

    bytes: Count
    sha256: Annotated[str, Limit(min_length=64, max_length=64)]


@dataclass(frozen=True, slots=True)
class _Files:
    files: Annotated[dict[str, FileRecord], Limit(min_length=1)]


def begin_artifact(folder: Path, kind: str) -> None:
    """Create `folder`, or check that it can be written and holds no other kind of artifact.

    Raises InvalidRequest if it cannot be created or written, or it holds another kind of artifact.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if (folder / MANIFEST).exists():
        stored_kind = read_json(folder / MANIFEST).get("kind")
        if stored_kind != kind:
            raise InvalidRequest(
                f"{folder} holds a {stored_kind}; choose another folder for a {kind}"
            )


def write_manifest(
    folder: Path,
    kind: str,
    facts: Mapping[str, Any],
    files: Iterable[str],
    update: Callable[[int], object] | None = None,
) -> None:
    """Describe `folder`, an artifact of this kind, as the last step of making it.

    Calls `update` with the bytes hashed so far. `is_checked` is true of the files then.
    """
    records, done = dict[str, FileRecord](), 0
    for name in files:
        path = folder / name
        records[name] = FileRecord(path.stat().st_size, sha256_of(path, update, done))
        done += records[name].bytes
    recorded = {name: asdict(record) for name, record in records.items()}
    write_json(folder / MANIFEST, {"kind": kind, "version": 1, **facts, "files": recorded})
    remember(folder, records)


def read_manifest(folder: Path, kind: str, facts: type[_T]) -> _T:
    """Facts in the manifest of an artifact; every file has its recorded size and checksum.

    Args:
        folder: the artifact.
        kind: the kind that it must be.
        facts: a dataclass of the other values that the manifest must have.

    Raises:
        ModelError: it is another kind of folder, or damaged; the message names every fault.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise ModelError(f"{folder} has no {MANIFEST}; expected a folder that holds a {kind}")
    value = read_json(path)
    if value.get("kind") != kind or value.get("version") != 1:
        raise ModelError(
            f"{folder} is a {value.get('kind')} of version {value.get('version')}; expected a "
            f"{kind} of version 1"
        )
    recorded = validated(facts, value, str(path), error=ModelError)
    files = validated(_Files, value, str(path), error=ModelError).files
    check_files(folder, files)
    if not is_checked(folder, files) and (faults := changed_contents(folder, files)):
        raise ModelError(f"{list_faults(str(path), faults)}; create or copy {folder} again")
    return recorded


def check_files(
    folder: Path, files: Mapping[str, FileRecord], required: Collection[str] = ()
) -> None:
    """Raise ModelError unless every file is in `folder` with its recorded size.

    For checksums see `changed_contents`. The message names every fault, and every `required` file
    that is not listed.
    """
    faults = [f"files does not list {name}" for name in required if name not in files]
    faults += [fault for name, record in files.items() for fault in _faults(folder, name, record)]
    if faults:
        raise ModelError(list_faults(str(folder / MANIFEST), faults))


def is_checked(folder: Path, files: Mapping[str, FileRecord]) -> bool:
    """Return whether files matched their checksums before, and have not changed since."""
    mark = _mark(folder, files)
    with suppress(OSError):
        os.utime(mark)  # used now
        return True
    return mark.exists()


def changed_contents(
    folder: Path, files: Mapping[str, FileRecord], update: Callable[[int], object] | None = None
) -> list[str]:
    """Hash all files; a line per file whose checksum differs. Without any, `is_checked` is true.

    Calls `update` with the bytes read so far.
    """
    mark, faults, done = _mark(folder, files), [], 0
    for name, record in files.items():
        digest = sha256_of(folder / name, update, done)
        done += record.bytes
        if digest != record.sha256:
            faults.append(f"{name} has changed: SHA-256 is {digest}, expected {record.sha256}")
    if not faults:
        _keep(mark)
    return faults


def remember(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Make `is_checked` true of files that were just hashed."""
    _keep(_mark(folder, files))


def _mark(folder: Path, files: Mapping[str, FileRecord]) -> Path:
    """Path of the empty file whose presence means: files in this state had their checksums.

    In the user's cache folder, because other folders may be read-only.
    """
    state = []
    for name, record in sorted(files.items()):
        stat = (folder / name).stat()
        state.append([name, stat.st_size, stat.st_mtime_ns, stat.st_ino, record.sha256])
    return cache_dir() / "checked" / digest_of(state)


def _keep(mark: Path) -> None:
    """Create a mark, and remove the least recently used of too many."""
    with suppress(OSError):  # a full or read-only cache: files are hashed again
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        marks = sorted(mark.parent.iterdir(), key=lambda other: other.stat().st_mtime)
        for old in marks[:-_MAX_MARKS]:
            old.unlink()


def _faults(folder: Path, name: str, record: FileRecord) -> Iterator[str]:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        yield f"files names {name!r}, expected a file in this folder"
    elif not path.is_file():
        yield f"{name} is missing"
    elif (size := path.stat().st_size) != record.bytes:
        yield f"{name} has {size} bytes, expected {record.bytes}"
