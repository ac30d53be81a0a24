"""The folder of what is learnt of a model: its answers to prompts, and tables counted from them.

The file of answers grows line by line; a run that was killed loses the answers that it was writing,
and the next one goes on. Invariant: a folder has answers of one model's weights alone.
"""

from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.decoding.types import FinishReason
from paceline.models import ModelFiles
from paceline.runtime.drafting import HEADER, learnt_dir
from paceline.storage.files import write_json, writing
from paceline.storage.journals import read_journal
from paceline.storage.validation import validated

KIND = "paceline learnt drafters"
ANSWERS = "answers.jsonl"

MAX_TOKENS = 8_000_000
"""Of the answers that a table is counted from, about: each takes some 40 bytes of memory."""


@dataclass(frozen=True, slots=True)
class TrainingAnswer:
    texts: list[str]
    """What the user says before it, in order: one text, or those of an earlier turn too."""
    prompt: list[int]
    """The whole prompt's token ids, in the chat template."""
    answer: list[int]
    """Token ids."""
    finish: str
    """Why it ended: a `FinishReason`."""
    kind: str = ""
    """How its prompt began."""
    seed: int | None = None
    """That the model wrote the prompt with; None: the user gave it."""

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]

    @property
    def loops(self) -> bool:
        """Whether it repeats itself: a drafter would learn to go round in it."""
        return self.finish == FinishReason.REPETITION


class LearntFolder:
    def __init__(self, files: ModelFiles, path: Path | None = None) -> None:
        """Create it, or open that of an earlier run; without a `path` that of the model.

        Raises InvalidRequest if it cannot be written.
        """
        self.path = path or learnt_dir() / files.fingerprint[:24]
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
        """The answers so far; of more than `MAX_TOKENS` tokens, the last ones.

        Raises InvalidRequest for a line that is no answer.
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
