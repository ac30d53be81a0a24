"""Reads and writes single files: JSON, atomic replacement, SHA-256."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest, ModelError
from paceline.storage.text import decode, unmarked
from paceline.system.machine import CACHE_VARIABLE, cache_dir, lock_path

CHUNK_BYTES = 1 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises ModelError for a missing or invalid file."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ModelError(f"{path} is not a file; expected a JSON file")
    try:
        value = json.loads(read_text(path))
    except (JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} should hold a JSON object, found {type(value).__name__}")
    return value


def read_text_config(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's `config.json`, or the part of it for text. Raises ModelError."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def read_text(path: Path) -> str:
    """Return the text of a model's file. Raises ModelError for a file that cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    check_no_pointer(path, content)
    return decode(content, path, error=ModelError).replace("\r\n", "\n")


def check_no_pointer(path: Path, head: bytes) -> None:
    """Raise ModelError for what Git LFS leaves of a file that it did not download."""
    if head.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a Git LFS pointer; download the file with `git lfs pull`")


def json_lines(content: bytes, file: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of JSON lines, each with its place (`line 3 of FILE`); empty lines are left out.

    Raises InvalidRequest, which names the line, if one is not a JSON object.
    """
    for number, line in enumerate(unmarked(content, file).split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {file}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidRequest(f"{where} is not a JSON object")
        yield where, value


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_bytes` does. Raises OSError."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def store_json(path: Path, value: Any) -> bool:
    """Write JSON that can be made again; return whether that was possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)
    except OSError:
        return False
    return True


def write_bytes(path: Path, content: bytes) -> None:
    """Write a temporary file in the same folder, then rename it to `path`. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def append_bytes(path: Path, content: bytes) -> None:
    """Append to a private file in one write: those of several processes do not mix. OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        written = os.write(descriptor, content)
    finally:
        os.close(descriptor)
    if written < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the body into InvalidRequest: "cannot write `path`: reason"."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}{elsewhere(path)}") from error


def elsewhere(path: Path) -> str:
    """Return how to choose another folder for a path of the cache, for an error; else nothing."""
    own = path.is_relative_to(cache_dir())
    return f"; choose another folder with ${CACHE_VARIABLE}" if own else ""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file or folder while the body writes it.

    Raises InvalidRequest if another run has it, or it is where nothing can be locked.
    """
    release = lock_path(path, wait=False)
    if release is None:
        raise InvalidRequest(
            f"{path} is being written by another run, or cannot be locked; wait until that has "
            "ended, or choose another place"
        )
    try:
        yield
    finally:
        release()


def sha256_of(path: Path, update: Callable[[int], object] | None = None, done: int = 0) -> str:
    """SHA-256 of a file, as hex. Calls `update` with the bytes read so far plus `done`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if update is not None:
                update(done)
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def remove(path: Path) -> None:
    """Remove a file, if it is there, or a folder. Raises ModelError if it cannot be removed."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"cannot remove {path}: {error.strerror}") from error


def size_of(path: Path, *, links: bool = False) -> int:
    """Bytes of a file, or of the files in a folder; `links`: also of those that links lead to."""
    total = 0
    for file in path.rglob("*") if path.is_dir() else (path,):
        if links or not file.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # a temporary file that was renamed
                total += file.stat().st_size if file.is_file() else 0
    return total


def megabytes(count: int) -> str:
    """`count` bytes for display, as in 12.3 MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
