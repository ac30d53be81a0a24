"""What a command makes: a folder that says, in `manifest.json`, what it is and what is in it.

Used by every room that reads or writes such a folder; knows nothing of what the files mean.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest, ModelError

MANIFEST = "manifest.json"
CORE_ML = "coreml-model"
"""The kind of a model for the engine `coreml`, which other rooms have to know one by."""
EMBEDDINGS = "embeddings.npy"
"""In such a model: [vocab, hidden_size] float16."""
HEAD = "head.npy"
"""The same for the head, where it is another matrix and the model has taps for a drafter."""

CHUNK_BYTES = 1 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError when it is missing, unreadable or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} should hold a JSON object, found {type(value).__name__}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_bytes` does. Raises OSError."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write beside, then rename: what was there is never half overwritten. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def begin(folder: Path, kind: str) -> None:
    """Make `folder` for an artifact of this kind, where nothing else is.

    Raises:
        InvalidRequest: it cannot be made or written, or it holds another kind of artifact.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if (folder / MANIFEST).exists():
        found = read_json(folder / MANIFEST).get("kind")
        if found != kind:
            raise InvalidRequest(f"{folder} holds a {found}; choose another folder for a {kind}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report a file or folder that cannot be written in one line: InvalidRequest for OSError."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from error


def sha256_of(path: Path, reach: Callable[[int], object] | None = None, done: int = 0) -> str:
    """The SHA-256 of a file, as hex; `reach` hears the bytes read, counted on from `done`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if reach is not None:
                reach(done)
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """A short name for any JSON value: other values have other names."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


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
