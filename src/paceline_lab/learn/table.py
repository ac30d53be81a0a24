"""Counts a table from a model's answers, and installs it if it makes `auto` faster.

Held-out answers are replayed with and without the table. The replay takes the same steps as real
requests, with forward-pass costs measured on this machine (`paceline_lab/simulate`).
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline.decoding.costs import CostTable
from paceline.drafters import Table
from paceline.drafters.table import COLUMNS, KIND, entry_bytes, halves
from paceline.drafters.table_counts import Answers, Entries, accuracy, count_table
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles, Progress
from paceline.runtime.drafting import Drafting, install
from paceline.runtime.request import check
from paceline.storage.files import megabytes, sha256_of, size_of, writing
from paceline.storage.manifest import begin_artifact, write_manifest
from paceline_lab.learn.folder import ANSWERS, LearnedFolder, TrainingAnswer
from paceline_lab.learn.variety import HELD_OUT, UNSEEN, Variety, part_of
from paceline_lab.simulate.replay import Recording, simulate
from paceline_lab.simulate.report import Total

TABLE_BYTES = 12_000_000

_MIN_GAIN = 1.01
"""Minimum speed of `auto` with a new table, over that without, to install the table."""

_MIN_ANSWERS = 8
"""Minimum answers of a set; fewer show too little."""

_MAX_SAMPLES = 100
"""Maximum replayed answers of a set."""

Sets = Mapping[str, Sequence[TrainingAnswer]]
"""Name -> answers that are excluded from learning: `held_out`, to questions of the learned kinds,
and one set to questions about the topics of `UNSEEN`."""


@dataclass(frozen=True, slots=True)
class Use:
    """A model in normal use: the target of `auto`."""

    files: ModelFiles
    vocab_size: int
    cost: CostTable
    """Forward-pass costs on this machine, in seconds."""


@dataclass(frozen=True, slots=True)
class Gain:
    """`auto` on one set, with the table and without."""

    answers: int
    tokens_per_step: float
    tokens_per_step_before: float
    speed: float
    """Speed over plain decoding, by forward-pass costs: geometric mean of the answers."""
    speed_before: float

    @property
    def gain(self) -> float:
        return self.speed / self.speed_before


def learn_table(
    folder: LearnedFolder,
    use: Use,
    forms: Sequence[ModelFiles],
    variety: Variety,
    progress: Progress,
) -> dict[str, Any]:
    """Count a table, and install it for all `forms` of the weights if it makes `auto` faster.

    Returns a report, as JSON. Raises InvalidRequest if there is nothing to learn from, or a file
    cannot be written.
    """
    answers = folder.answers()
    training, sets = divided(answers)
    if not training:
        raise InvalidRequest(
            f"{len(answers)} answers are in {folder.path}, and none of them is usable; "
            "learn for longer: --hours, --tokens"
        )
    path = folder.new_table()
    with progress.task("counting the table"):
        count(
            folder,
            path,
            target=use.files.name,
            vocab_size=use.vocab_size,
            training=training,
            sets=sets,
        )
    with progress.task("replaying held-out answers"):
        gains = _gains(use, path, sets)
    installed = is_gain(gains)
    size = size_of(path)
    with writing(folder.path):
        _install(path, forms, gains=installed)
    return {
        "model": use.files.name,
        "folder": str(folder.path),
        "prompts": variety.figures(),
        "answers": {
            **_figures(answers),
            "loops": sum(answer.loops for answer in answers),
            "training": _figures(training),
            **{name: _figures(chosen) for name, chosen in sets.items()},
        },
        "table": {
            "bytes": size,
            "installed": installed,
            "sets": {name: {**asdict(gain), "gain": gain.gain} for name, gain in gains.items()},
        },
    }


def divided(answers: Sequence[TrainingAnswer]) -> tuple[list[TrainingAnswer], Sets]:
    """Return the answers to learn from, and those to evaluate on, both without loops."""
    parts: dict[str, list[TrainingAnswer]] = {}
    for answer in answers:
        if len(answer.answer) > 1 and not answer.loops:
            parts.setdefault(part_of(answer.texts), []).append(answer)
    unseen = [answer for topic in UNSEEN for answer in parts.pop(topic, [])]
    sets = {"held_out": parts.pop(HELD_OUT, []), " and ".join(UNSEEN): unseen}
    return [answer for part in parts.values() for answer in part], sets


def is_gain(gains: Mapping[str, Gain]) -> bool:
    """Return True if a table is worth installing: it gains on both sets, and none is too small."""
    return len(gains) > 1 and all(
        one.gain >= _MIN_GAIN and one.answers >= _MIN_ANSWERS for one in gains.values()
    )


def _pairs(answers: Sequence[TrainingAnswer]) -> Answers:
    return [(answer.prompt, answer.answer) for answer in answers]


def count(
    folder: LearnedFolder,
    path: Path,
    *,
    target: str,
    vocab_size: int,
    training: Sequence[TrainingAnswer],
    sets: Sets,
    size: int = TABLE_BYTES,
) -> None:
    """Write the table of a folder's answers to `path`, in at most `size` bytes."""
    entries = count_table(_pairs(training)).best(size // entry_bytes(vocab_size))
    facts: dict[str, Any] = {
        "made_from": [{"answers": ANSWERS, "sha256": sha256_of(folder.path / ANSWERS)}],
        "answers": len(training),
        "answer_tokens": sum(len(answer.answer) for answer in training),
        **{name: accuracy(entries, _pairs(answers)) for name, answers in sets.items() if answers},
    }
    write_table(entries, path, target=target, vocab_size=vocab_size, facts=facts)


def write_table(
    entries: Entries, folder: Path, *, target: str, vocab_size: int, facts: dict[str, Any]
) -> None:
    """Write a table's folder; `facts` go into its manifest."""
    begin_artifact(folder, KIND)
    about = {
        "made_by": f"paceline {paceline.__version__}",
        "target": target,
        "vocab_size": vocab_size,
        "entries": len(entries.keys),
        **facts,
    }
    columns = entries.columns(vocab_size)
    with writing(folder):
        # A running process may have the old files mapped: replace them, never write into them.
        for name, column in zip(COLUMNS, columns._replace(keys=halves(columns.keys)), strict=True):
            np.save(folder / f".{name}", column)
            (folder / f".{name}").replace(folder / name)
        write_manifest(folder, KIND, about, COLUMNS)


def text_of(report: Mapping[str, Any]) -> str:
    answers = report["answers"]
    return "\n".join(
        [
            f"{answers['answers']} answers with {answers['tokens']:,} tokens, {answers['loops']} "
            f"loops left out; {report['prompts']['prompts']} prompts of the model's own",
            *_table_lines(report["table"]),
        ]
    )


def _gains(use: Use, table: Path, sets: Sets) -> dict[str, Gain]:
    """Return the gains of `auto` with `table`, by set; empty sets are omitted."""
    gains = {}
    for name, answers in sets.items():
        recordings = [
            Recording(
                str(number),
                answer.kind,
                answer.prompt,
                answer.answer,
                len(answer.answer) + 1 if answer.finish == "stop" else None,
            )
            for number, answer in enumerate(answers[:_MAX_SAMPLES])
        ]
        if recordings:
            old, new = (_replayed(recordings, use, path) for path in (None, table))
            gains[name] = Gain(len(recordings), new.ideal, old.ideal, new.mean(), old.mean())
    return gains


def _replayed(recordings: Sequence[Recording], use: Use, table: Path | None) -> Total:
    """Replay recordings by `auto` with a table; None: with the model's present one, if any."""
    shared = Drafting(use.files).resources
    table = table or shared.shipped.get("table")
    # Drafters that read hidden states cannot be replayed.
    shared.shipped = {} if table is None else {"table": table}
    if table is not None:
        shared.tables[""] = Table.open(table, use.vocab_size)
    return Total(simulate(recordings, check({"drafter": "auto"}), use.cost, shared))


def _install(path: Path, forms: Sequence[ModelFiles], *, gains: bool) -> None:
    """Install a table if `auto` gains by it, and remove the old one; else remove the new one."""
    if gains:
        for files in forms:
            install(files, "table", path)
    for other in path.parent.glob("table-*"):
        if (other != path) == gains:
            with suppress(OSError):  # on Windows, while a process has it open
                shutil.rmtree(other)


def _figures(answers: Sequence[TrainingAnswer]) -> dict[str, int]:
    return {"answers": len(answers), "tokens": sum(len(answer.answer) for answer in answers)}


def _table_lines(table: Mapping[str, Any]) -> Iterator[str]:
    for name, one in table["sets"].items():
        yield (
            f"table, {name.replace('_', ' ')}: {one['tokens_per_step']:.2f} tokens per step "
            f"({one['tokens_per_step_before']:.2f} without it), {one['speed']:.2f}x the speed of "
            f"plain decoding ({one['speed_before']:.2f}), {one['answers']} answers"
        )
    if table["installed"]:
        yield f"the table is installed ({megabytes(table['bytes'])}): `auto` uses it"
    else:
        yield (
            "the table is not installed: `auto` gains less than 1 % by it, or fewer than "
            f"{_MIN_ANSWERS} answers of a set are here; learning longer may change that"
        )
