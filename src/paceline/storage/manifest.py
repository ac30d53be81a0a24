"""Artifacts of paceline's commands: folders with a `manifest.json` that names kind and files.

Independent of what the files contain.
"""

import errno
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from paceline.errors import InvalidRequest, ModelError
from paceline.storage.files import read_json, sha256_of, write_json, writing
from paceline.storage.validation import Count, Limit, listed, validated

MANIFEST = "manifest.json"

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
        found = read_json(folder / MANIFEST).get("kind")
        if found != kind:
            raise InvalidRequest(f"{folder} holds a {found}; choose another folder for a {kind}")


def write_manifest(folder: Path, kind: str, facts: Mapping[str, Any], files: Iterable[str]) -> None:
    """Describe `folder`, an artifact of this kind, as the last step of making it."""
    recorded = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
        for name in files
    }
    write_json(folder / MANIFEST, {"kind": kind, "version": 1, **facts, "files": recorded})


def read_manifest(folder: Path, kind: str, facts: type[_T]) -> _T:
    """Facts in the manifest of an artifact; every file is present with its recorded size.

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
    found = validated(facts, value, str(path), error=ModelError)
    check_files(folder, validated(_Files, value, str(path), error=ModelError).files)
    return found


def check_files(
    folder: Path, files: Mapping[str, FileRecord], required: Collection[str] = ()
) -> None:
    """Raise ModelError unless every file is in `folder` with its recorded size.

    Contents are not hashed. The message names every fault, and every `required` file not listed.
    """
    faults = [f"files does not list {name}" for name in required if name not in files]
    faults += [fault for name, record in files.items() for fault in _faults(folder, name, record)]
    if faults:
        raise ModelError(listed(str(folder / MANIFEST), faults))


def _faults(folder: Path, name: str, record: FileRecord) -> Iterator[str]:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        yield f"files names {name!r}, expected a file in this folder"
    elif not path.is_file():
        yield f"{name} is missing"
    elif (size := path.stat().st_size) != record.bytes:
        yield f"{name} has {size} bytes, expected {record.bytes}"
