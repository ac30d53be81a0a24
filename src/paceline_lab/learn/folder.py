"""A model's training folder: its answers to prompts, and tables counted from them.

The file of answers grows line by line; a killed run loses only the unfinished answers, and the next
run continues. Invariant: all answers in a folder are from the weights of one model.
"""

from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.decoding.types import FinishReason
from paceline.models import ModelFiles
from paceline.runtime.drafting import HEADER, learned_dir
from paceline.storage.files import write_json, writing
from paceline.storage.journals import read_journal
from paceline.storage.validation import validated

KIND = "paceline learnt drafters"
ANSWERS = "answers.jsonl"

MAX_TOKENS = 8_000_000
"""Maximum answer tokens to count a table from, about; each takes some 40 bytes of memory."""


@dataclass(frozen=True, slots=True)
class TrainingAnswer:
    texts: list[str]
    """The user's messages before it, in order, earlier turns included."""
    prompt: list[int]
    """Token ids of the whole prompt, in the chat template."""
    answer: list[int]
    """Token ids of the answer."""
    finish: str
    """The finish reason: a `FinishReason`."""
    kind: str = ""
    """Kind of the prompt's opening."""
    seed: int | None = None
    """Seed of the prompt's generation; None: the user gave the prompt."""

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]

    @property
    def loops(self) -> bool:
        """True if the answer repeats itself: a drafter would learn to repeat it."""
        return self.finish == FinishReason.REPETITION


class LearnedFolder:
    def __init__(self, files: ModelFiles, path: Path | None = None) -> None:
        """Create the folder, or open that of an earlier run; the default `path` is the model's.

        Raises InvalidRequest if it cannot be written.
        """
        self.path = path or learned_dir() / files.fingerprint[:24]
        header = {
            "kind": KIND,
            "version": 1,
            "model": files.name,
            "engine": files.engine,
            "fingerprint": files.fingerprint,
            "paceline": paceline.__version__,
        }
        with writing(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (self.path / HEADER).exists():
                write_json(self.path / HEADER, header)

    def answers(self) -> list[TrainingAnswer]:
        """Return the answers so far, limited to the last `MAX_TOKENS` tokens.

        Raises InvalidRequest for a line that is not an answer.
        """
        entries = read_journal(self.path / ANSWERS)
        answers = [validated(TrainingAnswer, entry, where) for where, entry in entries]
        tokens = sum(len(answer.answer) for answer in answers)
        first = 0
        while tokens > MAX_TOKENS:
            tokens -= len(answers[first].answer)
            first += 1
        return answers[first:]

    def new_table(self) -> Path:
        numbers = [int(path.name.rpartition("-")[2]) for path in self.path.glob("table-*")]
        return self.path / f"table-{max(numbers, default=0) + 1}"
