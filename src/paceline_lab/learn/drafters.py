"""Drafters of what was learnt: made, compared with what `auto` has, and installed if it gains."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.decoding.costs import CostTable
from paceline.drafters.table import entry_bytes
from paceline.drafters.table_counts import accuracy, count_table
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles, Progress
from paceline.runtime.learnt import install
from paceline.storage.files import write_json, writing
from paceline_lab.learn.budget import Budget
from paceline_lab.learn.evaluate import Comparison, Sets, compare_tables, divided, is_gain
from paceline_lab.learn.folder import Example, LearntFolder
from paceline_lab.learn.head import compare_head, head_folder, is_unfinished, make_head
from paceline_lab.learn.variety import Variety
from paceline_lab.train.table import write_table

TABLE_BYTES = 12_000_000
REPORT = "report.json"


@dataclass(frozen=True, slots=True)
class Use:
    """A model as it answers people: what `auto` drafts for."""

    name: str
    """As the user gave it."""
    files: ModelFiles
    vocab_size: int
    cost: CostTable
    """Seconds of its calls on this machine."""


class Learner:
    """Makes the drafters of one model."""

    def __init__(
        self,
        folder: LearntFolder,
        use: Use,
        forms: Sequence[ModelFiles],
        budget: Budget,
        progress: Progress,
    ) -> None:
        """Prepare; drafters are installed for all `forms` of the model's weights."""
        self._folder, self._use, self._forms = folder, use, forms
        self._budget, self._progress = budget, progress

    def has_unfinished_head(self) -> bool:
        """Whether a head of the answers that are here was being trained."""
        if not any(map(is_unfinished, self._folder.path.glob("mtp-*"))):
            return False
        training, _ = divided(self._folder.examples())
        return is_unfinished(head_folder(self._folder.path, training))

    def report(self, variety: Variety, no_head: str) -> dict[str, Any]:
        """Make, compare and install drafters; returns what was learnt, as JSON.

        `no_head` is why no head is made, or empty. Raises InvalidRequest if there is nothing to
        learn from, or a file cannot be written.
        """
        examples = self._folder.examples()
        training, sets = divided(examples)
        if not training:
            raise InvalidRequest(
                f"{len(examples)} answers are in {self._folder.path}, and none of them can be "
                "learnt from; learn for longer: --hours, --tokens"
            )
        drafters = [self._table(training, sets)]
        if no_head:
            self._progress.say(no_head)
        else:
            drafters += self._head(training, sets)
        report = {
            "model": self._use.files.name,
            "folder": str(self._folder.path),
            "prompts": variety.figures(),
            "answers": _figures(examples, training, sets),
            "drafters": drafters,
            "seconds": self._budget.elapsed,
        }
        with writing(self._folder.path):
            write_json(self._folder.path / REPORT, report)
        return report

    def _table(self, training: Sequence[Example], sets: Sets) -> dict[str, Any]:
        path = self._folder.new_folder("table")
        answers = [example.answer for example in training]
        use = self._use
        with self._progress.task("counting the table"):
            entries = count_table(answers).best(TABLE_BYTES // entry_bytes(use.vocab_size))
            facts: dict[str, Any] = {
                "made_from": self._folder.provenance(),
                "answers": len(answers),
                "answer_tokens": sum(len(answer.answer) for answer in answers),
                **{
                    name: accuracy(entries, [example.answer for example in examples])
                    for name, examples in sets.named.items()
                    if examples
                },
            }
            write_table(
                entries, path, target=use.files.name, vocab_size=use.vocab_size, facts=facts
            )
        with self._progress.task("replaying held-out answers"):
            compared = compare_tables(use.files, path, use.vocab_size, use.cost, sets)
        return self._judged("table", path, compared, sets, self._forms)

    def _head(self, training: Sequence[Example], sets: Sets) -> list[dict[str, Any]]:
        """The head, if the model can have one, and there are new answers for it."""
        path = head_folder(self._folder.path, training)
        if path.is_dir() and not is_unfinished(path):
            return []
        use, budget, progress = self._use, self._budget, self._progress
        try:
            with writing(path):
                trained = make_head(use.name, path, training, budget=budget, progress=progress)
            if not trained:
                progress.say("no time is left to train a head; the same command goes on with it")
                return []
            compared = compare_head(
                use.name,
                path,
                sets,
                engine=use.files.engine,
                budget=budget,
                progress=progress,
            )
        except (InvalidRequest, ModelError) as error:
            progress.say(f"no head is trained: {error}")
            shutil.rmtree(path, ignore_errors=True)  # a later call begins anew
            return []
        return [self._judged("mtp", path, compared, sets, self._forms)]

    def _judged(
        self,
        kind: str,
        path: Path,
        compared: Mapping[str, Comparison],
        sets: Sets,
        forms: Sequence[ModelFiles],
    ) -> dict[str, Any]:
        """Install a drafter if `auto` gains by it, and remove it or the one before."""
        installed = is_gain(compared, sets)
        size = sum(file.stat().st_size for file in path.iterdir())
        with writing(path):
            if installed:
                for files in forms:
                    install(files, kind, path)
        for other in path.parent.glob(f"{kind}-*"):
            if (other != path) == installed:
                with suppress(OSError):  # on Windows, while a process has it open
                    shutil.rmtree(other)
        return {
            "kind": kind,
            "bytes": size,
            "installed": installed,
            "sets": {name: one.as_dict() for name, one in compared.items()},
        }


def _figures(
    examples: Sequence[Example], training: Sequence[Example], sets: Sets
) -> dict[str, Any]:
    def count(chosen: Sequence[Example]) -> dict[str, int]:
        tokens = sum(len(example.answer.answer) for example in chosen)
        return {"answers": len(chosen), "tokens": tokens}

    return {
        **count(examples),
        "loops": sum(example.loops for example in examples),
        "training": count(training),
        **{name: count(chosen) for name, chosen in sets.named.items()},
    }
