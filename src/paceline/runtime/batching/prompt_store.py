"""KV of prompts on disk, so that a long prompt is computed once and not at every start.

A file holds the KV of `_TOKENS` consecutive tokens. Its name is a hash of these tokens and of all
before them, so prompts with the same beginning share files, and a conversation adds only what is
new. Files are written by a thread of their own, and the least recently used are removed first.

Invariants: files of another model, engine or format are never read; what is read has the checksum
it was written with; and no fault of a file or of the disk fails a request. The first fault of the
disk ends the keeping until the next start, with one line in the log.
"""

import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.engines.base import Engine, KeepsKV, KVSequence
from paceline.errors import CacheFull
from paceline.storage.files import digest_of, write_bytes

log = logging.getLogger("paceline.server")

Tokens: TypeAlias = npt.NDArray[np.int64]
Arrays: TypeAlias = Mapping[str, npt.NDArray[np.float16]]

_TOKENS = 128
"""Tokens of a file, at least: whole KV blocks."""

_FORM = "paceline-kv 1"
_MOST_PENDING = 1 << 28
"""Bytes that may wait to be written: more are left for the next time."""

_STALE_SECONDS = 3600.0
"""Age of a half-written file that no server writes any more."""

_CLOSE_SECONDS = 5.0
"""How long a shutdown waits for files to be written."""

_PRUNED_SHARE = 0.9
"""Share of the limit that remains after files were removed."""


class _Write(NamedTuple):
    path: Path
    arrays: Arrays
    bytes: int


class PromptStore:
    """The files of one model in one engine. For the engine's thread alone, but for the writer."""

    def __init__(self, folder: Path, engine: Engine, fingerprint: str, most_bytes: int) -> None:
        """Keep at most `most_bytes` of all models together in `folder`.

        `fingerprint` is the model's. Nothing is kept if the engine cannot give its KV away, or the
        folder cannot be written: one warning says so.
        """
        self._engine = engine if isinstance(engine, KeepsKV) and engine.keeps_kv else None
        self._most = most_bytes
        self._root = folder
        self._folder = folder / digest_of([_FORM, fingerprint, sorted(engine.describe().items())])
        size = engine.block_size
        self._length = -(-_TOKENS // size) * size
        self._queue: queue.Queue[_Write | None] = queue.Queue()
        self._pending = self._used = 0
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        if self._engine is None:
            log.warning("prompts are not kept: the engine %s copies no KV", engine.name)
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / ".writable").touch()
            self._remove_stale()
            self._prune()
        except OSError as error:
            self._give_up(error)

    def extend(self, sequence: KVSequence, prompt: Tokens) -> int:
        """Add what the files have of a prompt after its tokens in memory; returns the tokens added.

        Args:
            sequence: open, with the KV of the prompt's first tokens.
            prompt: [n] token ids.
        """
        engine = self._engine  # the writer may give up meanwhile
        start = sequence.length
        if engine is None or start % self._length:
            return 0
        for at, path in self._files(prompt):
            if at < start:
                continue
            arrays = self._read(path)
            if arrays is None:
                break
            try:
                engine.extend_kv(sequence, arrays)
            except (CacheFull, ValueError) as error:
                log.info("prompts on disk were not used: %s", error)
                break
        return sequence.length - start

    def save(self, sequence: KVSequence, tokens: Tokens) -> None:
        """Write the KV of a prompt, as far as there is no file of it, in the background."""
        engine = self._engine
        if engine is None:
            return
        for at, path in self._files(tokens[: sequence.shareable_length]):
            with suppress(OSError):
                os.utime(path)  # used now
                continue
            with self._lock:
                if self._pending > _MOST_PENDING:
                    return
            arrays = engine.kv_of(sequence, at, at + self._length)
            size = sum(array.nbytes for array in arrays.values())
            with self._lock:
                self._pending += size
            self._queue.put(_Write(path, arrays, size))
            self._start()

    def close(self) -> None:
        """Write what is pending, as far as there is time, and end the thread."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join(_CLOSE_SECONDS)
            self._writer = None

    def _files(self, tokens: Tokens) -> Iterator[tuple[int, Path]]:
        """The first token and the path of each whole part of a prompt, whether it is there or not.

        A prompt's last token is always computed: its row picks the answer's first token.
        """
        hashed = hashlib.sha256()
        for at in range(0, len(tokens) - self._length, self._length):
            hashed.update(np.ascontiguousarray(tokens[at : at + self._length], "<i8").tobytes())
            yield at, self._folder / f"{hashed.copy().hexdigest()[:40]}.kv"

    def _read(self, path: Path) -> Arrays | None:
        """The KV of a file; None if there is none, or none that can be used."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up(error)
            return None
        head, _, rest = content.partition(b"\n")
        fault: object = "it is not what was written"
        if head == _head(rest).encode():
            try:
                with suppress(OSError):
                    os.utime(path)  # used now
                return load(rest)
            except (SafetensorError, ValueError, KeyError) as error:
                fault = error
        log.warning("%s is ignored and removed: %s", path, fault)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._give_up(error)
        return None

    def _start(self) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="paceline-prompts")
            self._writer.daemon = True
            self._writer.start()

    def _write_all(self) -> None:
        from safetensors.numpy import save

        while (item := self._queue.get()) is not None:
            try:
                if self._engine is not None:
                    content = save(dict(item.arrays))
                    write_bytes(item.path, _head(content).encode() + b"\n" + content)
                    self._used += item.bytes
                    if self._used > self._most:
                        self._prune()
            except Exception as error:
                self._give_up(error)
            finally:
                with self._lock:
                    self._pending -= item.bytes

    def _prune(self) -> None:
        """Count the files of all models; if they are too large, remove the least recently used."""
        files = []
        for path in self._root.glob("*/*.kv"):
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        self._used = sum(size for _, size, _ in files)
        if self._used <= self._most:
            return
        for _, size, path in sorted(files):
            if self._used <= _PRUNED_SHARE * self._most:
                return
            with suppress(OSError):
                path.unlink()
                self._used -= size

    def _remove_stale(self) -> None:
        """Remove what servers that were killed left half-written."""
        for path in self._root.glob("*/.*.kv.*"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - _STALE_SECONDS:
                    path.unlink()

    def _give_up(self, error: Exception) -> None:
        """Read and write nothing more, in any thread; the first error is logged."""
        with self._lock:
            gave_up, self._engine = self._engine is None, None
        if not gave_up:
            reason = getattr(error, "strerror", None) or error
            log.warning("prompts are not kept in %s: %s", self._folder, reason)


def _head(content: bytes) -> str:
    """The first line of a file with this content."""
    return f"{_FORM} {hashlib.sha256(content).hexdigest()}"
