"""A table counted from a model's answers: written, compared with what `auto` has, installed."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline.decoding.costs import CostTable
from paceline.drafters.table import COLUMNS, KIND, entry_bytes, halves
from paceline.drafters.table_counts import Entries, accuracy, count_table
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles, Progress
from paceline.runtime.learnt import install
from paceline.storage.files import megabytes, write_json, writing
from paceline.storage.manifest import begin_artifact, write_manifest
from paceline_lab.learn.evaluate import LEAST_ANSWERS, Sets, compare_tables, divided, is_gain
from paceline_lab.learn.folder import Example, LearntFolder
from paceline_lab.learn.variety import Variety

TABLE_BYTES = 12_000_000
REPORT = "report.json"

_TOPICS = 6
"""Topics that are named."""


@dataclass(frozen=True, slots=True)
class Use:
    """A model as it answers people: what `auto` drafts for."""

    files: ModelFiles
    vocab_size: int
    cost: CostTable
    """Seconds of its calls on this machine."""


def learn_table(
    folder: LearntFolder,
    use: Use,
    forms: Sequence[ModelFiles],
    variety: Variety,
    progress: Progress,
) -> dict[str, Any]:
    """Count a table, and install it for all `forms` of the weights if `auto` gains by it.

    Returns what was learnt, as JSON. Raises InvalidRequest if there is nothing to learn from, or a
    file cannot be written.
    """
    examples = folder.examples()
    training, sets = divided(examples)
    if not training:
        raise InvalidRequest(
            f"{len(examples)} answers are in {folder.path}, and none of them can be learnt from; "
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
        compared = compare_tables(use.files, path, use.vocab_size, use.cost, sets)
    gains = is_gain(compared, sets)
    report = {
        "model": use.files.name,
        "folder": str(folder.path),
        "prompts": variety.figures(),
        "answers": {
            **_figures(examples),
            "loops": sum(example.loops for example in examples),
            "training": _figures(training),
            **{name: _figures(chosen) for name, chosen in sets.named.items()},
        },
        "table": {
            "bytes": sum(file.stat().st_size for file in path.iterdir()),
            "installed": gains,
            "sets": {name: one.as_dict() for name, one in compared.items()},
        },
    }
    with writing(folder.path):
        _install(path, forms, gains=gains)
        write_json(folder.path / REPORT, report)
    return report


def count(
    folder: LearntFolder,
    path: Path,
    *,
    target: str,
    vocab_size: int,
    training: Sequence[Example],
    sets: Sets,
    size: int = TABLE_BYTES,
) -> None:
    """Write the table of examples of a folder to `path`, in `size` bytes at most."""
    answers = [example.answer for example in training]
    entries = count_table(answers).best(size // entry_bytes(vocab_size))
    facts: dict[str, Any] = {
        "made_from": folder.provenance(),
        "answers": len(answers),
        "answer_tokens": sum(len(answer.answer) for answer in answers),
        **{
            name: accuracy(entries, [example.answer for example in examples])
            for name, examples in sets.named.items()
            if examples
        },
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
    """The report of `learn_table` for people."""
    answers = report["answers"]
    return "\n".join(
        [
            f"{answers['answers']} answers with {answers['tokens']:,} tokens, {answers['loops']} "
            "loops left out",
            *_prompt_lines(report["prompts"]),
            *_table_lines(report["table"]),
        ]
    )


def _install(path: Path, forms: Sequence[ModelFiles], *, gains: bool) -> None:
    """Install a table if `auto` gains by it, and remove the one before; else remove this one."""
    if gains:
        for files in forms:
            install(files, "table", path)
    for other in path.parent.glob("table-*"):
        if (other != path) == gains:
            with suppress(OSError):  # on Windows, while a process has it open
                shutil.rmtree(other)


def _figures(examples: Sequence[Example]) -> dict[str, int]:
    tokens = sum(len(example.answer.answer) for example in examples)
    return {"answers": len(examples), "tokens": tokens}


def _prompt_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    if figures["prompts"]:
        topics = [f"{name} {share:.0%}" for name, share in figures["topics"].items()]
        yield (
            f"{figures['prompts']} prompts, {figures['distinct_4_grams']:.0%} of four-word runs "
            f"new: {figures['words']:g} words, {figures['code']:.0%} with code, "
            f"{figures['second_turns']:.0%} second turns; {', '.join(topics[:_TOPICS])}"
        )


def _table_lines(table: Mapping[str, Any]) -> Iterator[str]:
    for name, one in table["sets"].items():
        yield (
            f"table, {name.replace('_', ' ')}: {one['tokens_per_step']:.2f} tokens a step "
            f"({one['tokens_per_step_before']:.2f} without it), {one['speed']:.2f} times plain "
            f"decoding ({one['speed_before']:.2f}), {one['answers']} answers"
        )
    if table["installed"]:
        yield f"the table is installed ({megabytes(table['bytes'])}): `auto` takes it from now on"
    else:
        yield (
            "the table is not installed: `auto` gains less than 1 % by it, or fewer than "
            f"{LEAST_ANSWERS} answers of a set are here; learning longer may change that"
        )
