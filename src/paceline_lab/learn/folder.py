"""The folder of what is learnt of a model: rounds of prompts, and the answers to them.

A round is a file of prompts and a file of answers, both of which grow line by line: a run that was
killed loses the lines that it was writing. Invariant: a folder has prompts and answers of one
model's weights alone.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.decoding.stopping import RepetitionDetector
from paceline.decoding.types import FinishReason
from paceline.errors import ModelError
from paceline.models import ModelFiles
from paceline.runtime.kept import LOOP
from paceline.runtime.learnt import HEADER, learnt_dir
from paceline.storage.files import read_json, sha256_of, write_json, writing
from paceline.storage.json_lines import read_entries
from paceline.verify.suite import load_suite
from paceline_lab.learn.answers import LOOP_FINISH, Answer, is_begun, read_answers
from paceline_lab.learn.prompts import Generated

KIND = "paceline learnt drafters"

MOST_TOKENS = 8_000_000
"""Of the answers that a table is counted from, about: each takes some 40 bytes of memory."""

_USERS, _OURS = "user-", "prompts-"
"""How the names of files of prompts begin: of the user, and of the model."""


@dataclass(frozen=True, slots=True)
class Round:
    """Prompts and the answers to them, which may not be there yet."""

    prompts: Path
    answers: Path

    @property
    def begun(self) -> bool:
        """Whether prompts are being answered, so that no more may be added."""
        return is_begun(self.answers)

    @property
    def complete(self) -> bool:
        """Whether every prompt has its answer."""
        return self.answers.is_file()

    @property
    def answered(self) -> list[Answer]:
        """The answers that are here, by number."""
        return read_answers(self.answers)

    @property
    def generated(self) -> list[Generated]:
        """The prompts that the model wrote; none of a round of the user's."""
        ours = self.prompts.name.startswith(_OURS)
        return read_entries(self.prompts, Generated) if ours else []


@dataclass(frozen=True, slots=True)
class Example:
    """An answer, and the messages of the user before it."""

    texts: Sequence[str]
    kind: str
    answer: Answer

    @property
    def loops(self) -> bool:
        """Whether the answer repeats itself: a drafter would learn to go round in it."""
        if self.answer.finish == FinishReason.STOP:
            return False
        detector = RepetitionDetector(LOOP)
        return self.answer.finish == LOOP_FINISH or any(map(detector.push, self.answer.answer))


class LearntFolder:
    """The folder of one model."""

    def __init__(self, files: ModelFiles, path: Path | None = None) -> None:
        """Create it, or open that of an earlier run; without a `path` that of the model.

        Raises:
            ModelError: what is here was learnt of other weights under the same name.
            InvalidRequest: it cannot be written.
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
        for other in sorted(self.path.parent.glob(f"*/{HEADER}")):
            _check_unchanged(other, header)
        with writing(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (self.path / HEADER).exists():
                write_json(self.path / HEADER, header)

    def rounds(self) -> Iterator[Round]:
        """The rounds that are here, first those of the user's own prompts."""
        for begin in (_USERS, _OURS):
            for path in sorted(self.path.glob(f"{begin}*.jsonl")):
                yield self._round(path)

    def next_round(self) -> tuple[int, Round]:
        """The first round by the model that is not complete, and its number from 0."""
        number = 0
        while (part := self.round(number)).complete:
            number += 1
        return number, part

    def round(self, number: int) -> Round:
        """A round by the model, which may not be here yet."""
        return self._round(self.path / f"{_OURS}{number:05}.jsonl")

    def user_round(self, path: Path) -> Round:
        """A round of the user's prompts, which are copied. Raises InvalidRequest."""
        digest = load_suite(path).sha256
        copy = self.path / f"{_USERS}{digest[:16]}.jsonl"
        with writing(copy):
            if not copy.exists():
                shutil.copyfile(path, copy.with_suffix(".partial"))
                copy.with_suffix(".partial").replace(copy)
        return self._round(copy)

    def tokens(self) -> int:
        """Tokens of the answers that are here."""
        return sum(len(answer.answer) for part in self.rounds() for answer in part.answered)

    def examples(self) -> list[Example]:
        """The answers that are here; of more than `MOST_TOKENS` tokens, those of the last rounds.

        Raises InvalidRequest for a line that is no answer.
        """
        rounds: list[list[Example]] = []
        tokens = 0
        for part in reversed([*self.rounds()]):
            if tokens >= MOST_TOKENS:
                break
            rounds.append(_examples(part))
            tokens += sum(len(example.answer.answer) for example in rounds[-1])
        return [example for examples in reversed(rounds) for example in examples]

    def provenance(self) -> list[dict[str, Any]]:
        """Rounds and their checksums, for the manifest of a table."""
        return [
            {"prompts": part.prompts.name, "sha256": sha256_of(part.answers)}
            for part in self.rounds()
            if part.complete
        ]

    def new_table(self) -> Path:
        """The path of a new table."""
        numbers = [int(path.name.rpartition("-")[2]) for path in self.path.glob("table-*")]
        return self.path / f"table-{max(numbers, default=0) + 1}"

    def _round(self, prompts: Path) -> Round:
        return Round(prompts, self.path / f"answers-{prompts.name}")


def _examples(part: Round) -> list[Example]:
    answers = part.answered
    if not answers:
        return []
    prompts = load_suite(part.prompts).prompts
    examples = []
    for answer in answers:
        prompt = prompts[answer.number]
        texts = [str(m["content"]) for m in prompt.messages if m.get("role") == "user"]
        examples.append(Example(texts or [""], prompt.kind, answer))
    return examples


def _check_unchanged(path: Path, header: dict[str, Any]) -> None:
    """Raise ModelError if a folder is of the model `header` with other weights."""
    try:
        other = read_json(path)
    except ModelError as error:
        raise ModelError(f"{error}; `paceline forget` removes it") from error
    same = all(other.get(name) == header[name] for name in ("model", "engine"))
    if same and other.get("fingerprint") != header["fingerprint"]:
        raise ModelError(
            f"{header['model']} has changed since it was learnt from: its weights are not those "
            f"of {path.parent}; remove that with `paceline forget --model {header['model']}`, and "
            "learn again"
        )
