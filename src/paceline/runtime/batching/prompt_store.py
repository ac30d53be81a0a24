"""KV of prompts on disk, so that a long prompt is computed once and not at every start.

A file holds the tokens of a prompt and the state of their sequence. Any of its prefixes can be
continued, so prompts with a common beginning share a file. A thread writes the files; the least
recently used are removed first.

Invariants: files of a different model, engine or format are never used, nor files with a wrong
checksum (numpy's archives have one); no fault of a file or of the disk fails a request.
"""

import io
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import common_prefix_length
from paceline.engines.base import Engine, KVSequence, KVState
from paceline.errors import CacheFull, ModelError
from paceline.storage.files import digest_of, elsewhere, write_bytes

log = logging.getLogger("paceline.server")

Tokens: TypeAlias = npt.NDArray[np.int64]

_FORM = 2  # version of the files
_MIN_TOKENS = 128  # minimum to write, or read

_COVERED = 3 / 4
"""Share of a prompt in an existing file that makes writing it again unnecessary. So the files of
one growing chat together have at most four times the size of its last file."""


class PromptStore:
    """The files of one model in one engine. Only the engine's thread uses it."""

    def __init__(self, folder: Path, engine: Engine, fingerprint: str, max_bytes: int) -> None:
        """Store at most `max_bytes` of all models together in `folder`.

        `fingerprint` is the model's. If the engine cannot export its KV, or the folder is not
        writable, one warning is logged and nothing is stored.
        """
        self._engine: Any = engine if getattr(engine, "can_export_kv", False) else None
        self._max_bytes, self._root = max_bytes, folder
        self._identity = digest_of([_FORM, fingerprint, sorted(engine.describe().items())])
        self._folder = folder / self._identity
        self._prompts: dict[Path, Tokens] = {}
        self._writer = ThreadPoolExecutor(1, "paceline-prompts")
        self._writing: Future[None] | None = None
        if self._engine is None:
            log.warning(
                "the prompt cache on disk is disabled: the engine %s cannot copy the KV of this "
                "model; use "
                "the engine llamacpp, and a model without recurrent layers",
                engine.name,
            )
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / ".writable").touch()
            self._prune()
            for path in self._folder.glob("[!.]*.kv"):
                tokens = self._read(path, "tokens")
                if tokens is not None:
                    self._prompts[path] = tokens
        except OSError as error:
            self._give_up(error)

    def extend(self, sequence: KVSequence, prompt: Tokens) -> int:
        """Copy the longest stored prefix of a prompt into its sequence; return the tokens added.

        The number is negative if the sequence, which has the KV of the prompt's first tokens, lost
        some. The last token is always computed: its row picks the answer's first token.
        """
        engine, start = self._engine, sequence.length  # the writer may disable itself at any time
        length, path = self._longest(prompt[:-1])
        if engine is None or path is None or length < start + _MIN_TOKENS:
            return 0
        tokens, data = self._prompts[path], self._read(path, "state")
        if data is None:
            return 0
        _touch(path)
        try:
            engine.restore(sequence, KVState(data, len(tokens)), length)
        except CacheFull as error:
            log.info("a prompt on disk is ignored: %s", error)
        except ModelError as error:
            self._ignore(path, error)
        return sequence.length - start

    def save(self, sequence: KVSequence, tokens: Tokens) -> None:
        """Write a sequence that holds `tokens` in the background, unless a file has most of them.

        While another write is in progress, nothing is written; the next call tries again.
        """
        engine = self._engine
        length, path = self._longest(tokens)
        if path is not None and length >= _COVERED * len(tokens):
            _touch(path)
        elif (
            engine is not None
            and len(tokens) >= _MIN_TOKENS
            and (self._writing is None or self._writing.done())
        ):
            path = self._folder / f"{sha256(tokens.tobytes()).hexdigest()[:40]}.kv"
            self._prompts[path] = tokens
            state = engine.state_of(sequence)
            self._writing = self._writer.submit(self._write, path, tokens, state)

    def close(self) -> None:
        """Wait for the current write, and write no more."""
        self._engine = None
        self._writer.shutdown()

    def _longest(self, prompt: Tokens) -> tuple[int, Path | None]:
        """Return the length of the longest stored prefix of a prompt, and its file."""
        prompts = self._prompts.items()
        lengths = [(common_prefix_length(tokens, prompt), path) for path, tokens in prompts]
        return max(lengths, default=(0, None))

    def _read(self, path: Path, name: str) -> npt.NDArray[Any] | None:
        """Return an array of a file, or None if the file is missing or cannot be used."""
        fault: object = "it belongs to another model"
        try:
            with np.load(path) as arrays:
                if str(arrays["identity"]) == self._identity:
                    array: npt.NDArray[Any] = arrays[name]
                    return array
        except FileNotFoundError:  # another server's limit was lower
            self._prompts.pop(path, None)
            return None
        except OSError as error:
            self._give_up(error)
            return None
        except Exception as error:  # numpy does not document its errors for damaged files
            fault = error
        self._ignore(path, fault)
        return None

    def _ignore(self, path: Path, fault: object) -> None:
        log.warning("%s is ignored and removed: %s", path, fault)
        self._prompts.pop(path, None)
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def _write(self, path: Path, tokens: Tokens, state: KVState) -> None:
        try:  # in the writer thread
            content = io.BytesIO()
            np.savez(content, identity=np.array(self._identity), tokens=tokens, state=state.data)
            write_bytes(path, content.getvalue())
            self._prune()
        except Exception as error:
            self._give_up(error)

    def _prune(self) -> None:
        """Remove the least recently used files over the limit, partial ones included."""
        files = []
        for path in self._root.glob("*/*.kv*"):
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used <= self._max_bytes:
                return
            with suppress(OSError):
                path.unlink()
                used -= size

    def _give_up(self, error: Exception) -> None:
        """Stop all reading and writing, in any thread; the first error is logged."""
        gave_up, self._engine = self._engine is None, None
        if not gave_up:
            reason = getattr(error, "strerror", None) or error
            advice = elsewhere(self._folder)
            log.warning("the prompt cache in %s is disabled: %s%s", self._folder, reason, advice)


def _touch(path: Path) -> None:
    with suppress(OSError):
        os.utime(path)
