"""Saves a model's answers on this machine, to draft later ones from them.

A folder for each model, named after its fingerprint, has three files: `model.json` with its name,
and `answers.jsonl`, which is appended to when an answer ends, in a single write, so that several
processes may save at once. A thread counts `counts.npz` from it, and replaces it by one rename.
Prompts are not saved, and neither are answers that repeat themselves.

Invariant: the history never changes a token or ends an answer: a read or write error prints one
line, and the answers continue without it.
"""

import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from paceline.decoding.stopping import Repetition, RepetitionDetector
from paceline.decoding.types import FinishReason
from paceline.drafters.kept import KeptText, due
from paceline.errors import ModelError
from paceline.models import Progress, cache_dir
from paceline.runtime.result import Result
from paceline.storage.files import (
    append_bytes,
    elsewhere,
    read_json,
    remove,
    size_of,
    write_bytes,
    write_json,
)

FOLDER = "kept"
_MODEL, _LOG, _COUNTS = "model.json", "answers.jsonl", "counts.npz"

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
        self._opened = self._failed = self._begun = False
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

    def add(self, answer: Result) -> None:
        """Save an answer, and count all answers in a thread if it is time."""
        tokens = answer.token_ids
        if self._failed or len(tokens) < 2 or _repeats(answer):
            return
        try:
            if not self._begun:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_json(self._folder / _MODEL, {"model": self._model})
                self._begun = True
            # The line begins with a newline, so that a truncated line does not corrupt others.
            append_bytes(self._log, f"\n{_line(tokens)}\n".encode())
            size = self._log.stat().st_size
        except OSError as error:
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
            self._text, self._counted_bytes = KeptText.open(
                self._counts, self._fingerprint, self._vocab_size
            )
        except (ModelError, OSError) as error:
            self._note(f"{_reason(error)}; it is ignored, and counted again from the next answers")

    def _count(self) -> None:
        """Count all answers and replace the counts; runs in a thread."""
        try:
            content = self._log.read_bytes()
            answers = self._answers(content)
            lengths = accumulate(map(len, reversed(answers)))
            dropped = sum(length > MAX_TOKENS for length in lengths)
            newest = answers[dropped:]
            size = len(content)
            if sum(map(len, newest)) * _SPARE < sum(map(len, answers)):
                # An answer that another process appends now is lost, which only costs drafts.
                shorter = "\n".join([*map(_line, newest), ""]).encode()
                write_bytes(self._log, shorter)
                size = len(shorter)
            text = KeptText.count(newest, self._vocab_size)
            text.write(self._counts, self._fingerprint, size)
            self._text, self._counted_bytes = text, size
        except OSError as error:
            self._fail(error)

    def _answers(self, content: bytes) -> list[list[int]]:
        """Return complete answers, oldest first."""
        answers = []
        for line in content.split(b"\n"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, list) and all(
                type(token) is int and 0 <= token < self._vocab_size for token in value
            ):
                answers.append(value)
        return answers

    def _fail(self, error: Exception) -> None:
        """Save nothing more in this process."""
        if not self._failed:
            self._failed = True
            self._fault = f"answers are not saved: {_reason(error)}{elsewhere(self._folder)}"

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
        for path in sorted(self.paths, key=Path.is_dir):  # first the files that name folders
            remove(path)


def all_kept() -> list[Stored]:
    """Return the saved answers of each model, by the model's name."""
    folders = (cache_dir() / FOLDER).glob("*")
    kept = [Stored(_name_of(folder), (folder,)) for folder in folders]
    return sorted((one for one in kept if one.bytes), key=lambda stored: stored.model)


def _name_of(folder: Path) -> str:
    name = model_named_in(folder / _MODEL)
    if not name:  # the first line has the name in folders of earlier checkouts
        faults = OSError, ValueError, LookupError, TypeError
        with contextlib.suppress(*faults), (folder / _LOG).open("rb") as file:
            name = str(json.loads(file.readline())["model"])
    return name


def model_named_in(path: Path) -> str:
    """Return the name of the model in a JSON file; empty without one."""
    try:
        return str(read_json(path).get("model", ""))
    except ModelError:
        return ""


def _repeats(answer: Result) -> bool:
    """Return whether an answer is in a loop; False if the model ended it."""
    reason = answer.finish_reason
    if reason == FinishReason.STOP:
        return False
    detector = RepetitionDetector(LOOP)
    return reason == FinishReason.REPETITION or any(map(detector.push, answer.token_ids))


def _line(answer: Sequence[int]) -> str:
    return json.dumps(answer, separators=(",", ":"))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the cache folder'}: {error.strerror or error}"
    return str(error)
