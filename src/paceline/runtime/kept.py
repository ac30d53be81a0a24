"""Saves a model's answers on this machine, to draft later ones from them.

A folder for each model has two files. `answers.jsonl` is appended to when an answer ends, in a
single write, so that several processes may save at once. A thread counts `counts.bin` from it, and
replaces it by one rename. Prompts are not saved, and neither are answers that repeat themselves.

Invariants: the history never changes a token or ends an answer: a read or write error prints one
line, and the answers continue without it. A file of a different model or version is neither read
nor written.
"""

import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.decoding.stopping import Repetition, RepetitionDetector
from paceline.decoding.types import FinishReason
from paceline.drafters.kept import KeptFacts, KeptText, due
from paceline.errors import ModelError
from paceline.models import Progress, cache_dir
from paceline.runtime.answer import Answer
from paceline.storage.files import append_bytes, elsewhere, remove, size_of, write_bytes

KIND = "paceline kept answers"
FOLDER = "kept"
_LOG, _COUNTS = "answers.jsonl", "counts.bin"

MAX_TOKENS = 500_000
"""Maximum tokens per model; older answers are dropped. About 12 MB with the counts."""

_SPARE = 1.25
"""The file of answers is rewritten when it has this many times `MAX_TOKENS`."""

_TOKEN_BYTES = 6  # of a token in `answers.jsonl`, about

LOOP = Repetition(max_pattern_size=128, min_count=4, min_tokens=64)
"""An answer with such a repetition is not saved: a table would learn to repeat it. The limits are
smaller than those that end an answer, because dropping one costs nothing."""


class KeptAnswers:
    def __init__(
        self, model: str, fingerprint: str, vocab_size: int, progress: Progress, folder: Path
    ) -> None:
        """Read nothing yet; `folder` is that of all models."""
        self._model, self._fingerprint, self._vocab_size = model, fingerprint, vocab_size
        self._note = progress.note
        self._folder = folder / fingerprint[:24]
        self._log, self._counts = self._folder / _LOG, self._folder / _COUNTS
        self._text: KeptText | None = None
        self._counted_bytes = 0
        self._opened = self._failed = self._may_write = False
        self._fault = ""  # not printed yet: it would be in the middle of the answer's text
        self._thread: threading.Thread | None = None

    @property
    def text(self) -> KeptText | None:
        """The counted answers, or None while too few are saved."""
        self._report_fault()
        if not self._opened:
            self._opened = True
            self._open()
        return self._text

    def add(self, answer: Answer) -> None:
        """Save an answer that has ended, and count all answers in a thread if it is time."""
        tokens = answer.generated
        if self._failed or answer.failed or len(tokens) < 2 or _repeats(answer):
            return
        try:
            self._check()
            # The line begins with a newline, so that a truncated line does not corrupt others.
            append_bytes(self._log, f"\n{_line(tokens)}\n".encode())
            size = self._log.stat().st_size
        except (OSError, ModelError) as error:
            self._fail(error)
            return
        _ = self.text  # sets the number of counted bytes
        counted = self._counted_bytes if size >= self._counted_bytes else 0
        busy = self._thread is not None and self._thread.is_alive()
        if due(size / _TOKEN_BYTES, counted / _TOKEN_BYTES) and not busy:
            self._thread = threading.Thread(target=self._count, name="paceline-kept", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Wait for the counting thread, if there is one, and report a failure to save."""
        if self._thread is not None:
            self._thread.join()
        self._report_fault()

    def _open(self) -> None:
        if not self._log.exists():
            self._note(
                f"the tokens of answers of {self._model} are saved on this machine, to draft later "
                "ones; `paceline forget` deletes them"
            )
        if not self._counts.exists():
            return
        try:
            self._text, facts = KeptText.open(self._counts, self._fingerprint, self._vocab_size)
            self._counted_bytes = facts.log_bytes
        except (ModelError, OSError) as error:
            self._note(f"{_reason(error)}; it is ignored, and counted again from the next answers")

    def _check(self) -> None:
        """Begin the file of answers, or check that it is this model's; once."""
        if self._may_write:
            return
        line = b""
        if self._log.exists():
            with self._log.open("rb") as file:
                line = file.readline()
        begun = f"{json.dumps(self._header())}\n".encode()
        if not line:  # several processes may write one: each of their lines is a header
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            append_bytes(self._log, line := begun)
        elif not line.endswith(b"\n"):  # writing it was interrupted
            write_bytes(self._log, line := begun)
        if not self._is_ours(_parsed(line)):
            raise ModelError(
                f"{self._log} has answers of another model or version; `paceline forget` removes it"
            )
        self._may_write = True

    def _count(self) -> None:
        """Count all answers and replace the counts; runs in a thread."""
        try:
            content = self._log.read_bytes()
            answers = self._answers(content)
            newest = _newest(answers, MAX_TOKENS)
            size = len(content)
            if sum(map(len, newest)) * _SPARE < sum(map(len, answers)):
                # An answer that another process appends now is lost, which only costs drafts.
                lines = [json.dumps(self._header()), *map(_line, newest), ""]
                shorter = "\n".join(lines).encode()
                write_bytes(self._log, shorter)
                size = len(shorter)
            text = KeptText.count(newest, self._vocab_size)
            text.write(self._counts, KeptFacts(self._fingerprint, self._vocab_size, size))
            self._text, self._counted_bytes = text, size
        except (OSError, ModelError) as error:
            self._fail(error)

    def _answers(self, content: bytes) -> list[list[int]]:
        """Return complete answers, oldest first. Raises ModelError for a different model's."""
        answers = []
        for line in content.split(b"\n"):
            value = _parsed(line)
            if isinstance(value, dict) and not self._is_ours(value):
                raise ModelError(f"{self._log} also has answers of another model or version")
            if isinstance(value, list) and all(
                type(token) is int and 0 <= token < self._vocab_size for token in value
            ):
                answers.append(value)
        return answers

    def _header(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "version": 1,
            "model": self._model,
            "fingerprint": self._fingerprint,
            "vocab_size": self._vocab_size,
        }

    def _is_ours(self, header: Any) -> bool:
        return isinstance(header, dict) and {**header, "model": self._model} == self._header()

    def _fail(self, error: Exception) -> None:
        """Save nothing more in this process."""
        if not self._failed:
            self._failed, self._fault = (
                True,
                (f"answers are not saved: {_reason(error)}{elsewhere(self._folder)}"),
            )

    def _report_fault(self) -> None:
        if self._fault:
            self._note(self._fault)
            self._fault = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """Saved answers of a model, or drafters learned for it (`drafting.py`)."""

    model: str
    """Name of the model; empty if the files do not have it."""
    paths: tuple[Path, ...]
    """Folders, and files that name drafters in them."""

    @property
    def bytes(self) -> int:
        return sum(map(size_of, self.paths))

    def remove(self) -> None:
        """Remove all of it. Raises ModelError."""
        for path in sorted(self.paths, key=Path.is_dir):  # first the files that name folders
            remove(path)


def all_kept() -> list[Stored]:
    """Return the saved answers of each model, by the model's name."""
    models = []
    for folder in (cache_dir() / FOLDER).glob("*"):
        header = None
        with contextlib.suppress(OSError), (folder / _LOG).open("rb") as file:
            header = _parsed(file.readline())
        name = header.get("model") if isinstance(header, dict) else None
        stored = Stored(name if isinstance(name, str) else "", (folder,))
        if stored.bytes:
            models.append(stored)
    return sorted(models, key=lambda stored: stored.model)


def _repeats(answer: Answer) -> bool:
    """Return whether an answer is in a loop; False if the model ended it."""
    assert answer.result is not None
    reason = answer.result.finish_reason
    if reason == FinishReason.STOP:
        return False
    detector = RepetitionDetector(LOOP)
    return reason == FinishReason.REPETITION or any(map(detector.push, answer.generated))


def _newest(answers: Sequence[list[int]], tokens: int) -> Sequence[list[int]]:
    """Return the newest answers with at most `tokens` tokens together, oldest first."""
    first = len(answers)
    while first and len(answers[first - 1]) <= tokens:
        first -= 1
        tokens -= len(answers[first])
    return answers[first:]


def _line(answer: Sequence[int]) -> str:
    return json.dumps(answer, separators=(",", ":"))


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the cache folder'}: {error.strerror or error}"
    return str(error)
