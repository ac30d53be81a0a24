"""Artifacts of paceline's commands: folders with a `manifest.json` that names kind and files.

Independent of what the files contain.
"""

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest, ModelError
from paceline.storage.files import read_json, sha256_of, write_json, writing

MANIFEST = "manifest.json"


def begin_artifact(folder: Path, kind: str) -> None:
    """Create `folder`, or check that it can be written and holds no other kind of artifact.

    Raises:
        InvalidRequest: it cannot be created or written, or it holds another kind of artifact.
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


def read_manifest(folder: Path, kind: str, facts: Mapping[str, type]) -> dict[str, Any]:
    """The manifest of an artifact, validated, with every file present and of its recorded size.

    Args:
        folder: the artifact.
        kind: what it must be.
        facts: what the manifest must say beside that, and the type of each.

    Raises:
        ModelError: it is no such artifact; the message names every fault.
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
    faults = [
        f"{name} is {value.get(name)!r}, expected a {expected.__name__}"
        for name, expected in facts.items()
        if not isinstance(value.get(name), expected) or isinstance(value.get(name), bool)
    ]
    files = value.get("files")
    if not isinstance(files, dict) or not files:
        faults.append("it lists no files")
    else:
        faults += [fault for name in files for fault in _file_faults(folder, name, files[name])]
    if faults:
        raise ModelError(f"{path} cannot be used: {'; '.join(faults)}")
    return value


def _file_faults(folder: Path, name: str, record: Any) -> list[str]:
    if Path(name).name != name or not isinstance(record, dict):
        return [f"{name!r} is no file of this folder"]
    if not (folder / name).is_file():
        return [f"{name} is missing"]
    found = (folder / name).stat().st_size
    if found != record.get("bytes"):
        return [f"{name} has {found} bytes, expected {record.get('bytes')}"]
    return []
