"""Implements `learn`: prompts, answers, a table, its evaluation, and what `auto` takes of it."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.suite import Suite, load_suite
from paceline.decoding.costs import CostTable
from paceline.drafters.table import entry_bytes
from paceline.drafters.table_counts import accuracy, count_table
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles, Progress
from paceline.runtime.learnt import install
from paceline.runtime.load import load
from paceline.storage.files import held, megabytes, write_json, writing
from paceline.storage.report import Report
from paceline.storage.system import lower_priority
from paceline_lab.learn.budget import Budget, LearningProgress, duration
from paceline_lab.learn.data import AT_ONCE, DataMaker, cache_tokens
from paceline_lab.learn.evaluate import Sets, compare_tables, divided, is_gain
from paceline_lab.learn.folder import Example, LearntFolder
from paceline_lab.learn.openings import openings
from paceline_lab.learn.variety import Variety
from paceline_lab.train.table import write_table

_TABLE_BYTES = 12_000_000

_DATA_SHARE = 0.9
"""Share of the time for prompts and answers; counting and replaying take the rest."""

_JSON_BYTES = 12
"""Of a token of an answer on disk, its prompt and the prompt's text included."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A model as it answers people: what `auto` may draft for."""

    files: ModelFiles
    vocab_size: int
    cost: CostTable


def learn(
    model: str,
    *,
    engine: str,
    hours: float,
    tokens: int | None,
    prompts: Sequence[Path],
    exclude: Sequence[Path],
    progress: Progress,
) -> Report:
    """Learn a drafter for a model, from where an earlier call was stopped.

    Args:
        model: name, path or hub name.
        engine: that the drafter is for; `auto`: the one that answers of the model run in.
        hours: of this call, at most.
        tokens: of answers to learn from; replaces `hours`.
        prompts: files of prompts to answer first.
        exclude: files of prompts that must not be learnt from.
        progress: shows stages and what is left.

    Raises:
        ModelError: the model cannot be loaded, cannot write prompts, or has changed since.
        InvalidRequest: a file cannot be read or written, or another run learns from this model.
    """
    suites = [load_suite(), *map(load_suite, exclude)]
    for path in prompts:
        load_suite(path)
    lower_priority()
    budget = Budget(float("inf") if tokens else hours * 3600, tokens)
    use = _use(model, engine, progress)
    # In calls of many sequences a second row each would halve the throughput, and texts to learn
    # from need no exact decoding.
    target = load(
        model,
        engine=engine,
        rows=1,
        cache_tokens=cache_tokens(),
        contexts=AT_ONCE,
        drafters=("none",),
        progress=progress,
    )
    with target:
        if not prompts:
            openings(target.files)  # refused before anything is written
        folder = LearntFolder(target.files)
        with held(folder.path), _said_if_stopped(progress):
            variety = _variety(folder, suites)
            shown = LearningProgress(progress, budget)
            progress.say(_notice(folder, budget, target.profile.cost, model))
            DataMaker(
                target, folder, variety, budget=budget, share=_DATA_SHARE, progress=shown
            ).run(prompts)
            examples = folder.examples()
            training, sets = divided(examples)
            if not training:
                raise InvalidRequest(_too_few(examples, folder))
            table = _count(training, sets, folder, use, progress)
            report = {
                "model": use.files.name,
                "folder": str(folder.path),
                "prompts": variety.figures(),
                "answers": _answer_figures(examples, training, sets),
                "drafters": [_judge(table, sets, use, [use.files, target.files])],
                "seconds": budget.elapsed,
            }
            with writing(folder.path):
                write_json(folder.path / "report.json", report)
    return Report(report, text=_text(report))


def _use(model: str, engine: str, progress: Progress) -> _Use:
    with load(model, engine=engine, progress=progress) as used:
        return _Use(used.files, used.engine.vocab_size, used.profile.cost)


def _variety(folder: LearntFolder, suites: Iterable[Suite]) -> Variety:
    """The prompts of earlier calls; those of suites are excluded, paceline's own among them."""
    messages = [one for suite in suites for prompt in suite.prompts for one in prompt.messages]
    turns = [turn for suite in suites for prompt in suite.prompts for turn in prompt.turns]
    variety = Variety([*(str(one.get("content", "")) for one in messages), *turns])
    for part in folder.rounds():
        if part.prompts.name.startswith("prompts-"):
            for prompt in part.generated:
                variety.add(prompt)
    return variety


def _notice(folder: LearntFolder, budget: Budget, cost: CostTable, model: str) -> str:
    """What learning will cost; raises InvalidRequest if the disk has less free."""
    rate = AT_ONCE / cost(AT_ONCE)
    tokens = budget.tokens or int(budget.seconds * _DATA_SHARE * rate)
    needed = tokens * _JSON_BYTES + 2 * _TABLE_BYTES
    with writing(folder.path):
        free = shutil.disk_usage(folder.path).free
    if free < needed:
        raise InvalidRequest(
            f"{folder.path} may get {megabytes(needed)} and its disk has {megabytes(free)} free; "
            "free some, or learn for less: --hours, --tokens"
        )
    time = duration(budget.seconds) if budget.tokens is None else f"about {duration(tokens / rate)}"
    return (
        f"learning from {model} for {time}, at the lowest priority: at most {megabytes(needed)} in "
        f"{folder.path}; nothing of it leaves this machine, and `paceline forget` removes it. It "
        "may be stopped at any time; the same command goes on"
    )


@contextmanager
def _said_if_stopped(progress: Progress) -> Iterator[None]:
    try:
        yield
    except BaseException:
        progress.say("what was learnt so far is kept; the same command goes on from there")
        raise


def _too_few(examples: Sequence[Example], folder: LearntFolder) -> str:
    return (
        f"{len(examples)} answers are in {folder.path}, and none of them can be learnt from; "
        "learn for longer: --hours, --tokens"
    )


def _count(
    training: Sequence[Example], sets: Sets, folder: LearntFolder, use: _Use, progress: Progress
) -> Path:
    """Count a table from examples; returns its folder."""
    path = folder.new_folder("table")
    answers = [example.answer for example in training]
    with progress.task("counting the table"):
        entries = count_table(answers).best(_TABLE_BYTES // entry_bytes(use.vocab_size))
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
        write_table(entries, path, target=use.files.name, vocab_size=use.vocab_size, facts=facts)
    return path


def _judge(table: Path, sets: Sets, use: _Use, forms: Sequence[ModelFiles]) -> dict[str, Any]:
    """Compare `auto` with a table and without; install it for `forms` of the model if it gains."""
    comparisons = compare_tables(use.files, table, use.vocab_size, use.cost, sets)
    installed = is_gain(comparisons, sets)
    size = sum(path.stat().st_size for path in table.iterdir())
    with writing(table):
        if installed:
            for files in forms:
                install(files, "table", table)
        for other in table.parent.glob("table-*"):
            if (other != table) == installed:
                with suppress(OSError):  # on Windows, of a process that has it open
                    shutil.rmtree(other)
    return {
        "kind": "table",
        "bytes": size,
        "installed": installed,
        "sets": {name: one.as_dict() for name, one in comparisons.items()},
    }


def _answer_figures(
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


def _text(report: Mapping[str, Any]) -> str:
    prompts, answers = report["prompts"], report["answers"]
    lines = [
        f"{answers['answers']} answers with {answers['tokens']:,} tokens, {answers['loops']} loops "
        "left out"
    ]
    if prompts["prompts"]:
        topics = ", ".join(
            f"{name} {share:.0%}" for name, share in [*prompts["topics"].items()][:6]
        )
        lines.append(
            f"{prompts['prompts']} prompts, {prompts['distinct_4_grams']:.0%} of four-word runs "
            f"new: {prompts['words']['median']:g} words, {prompts['code']:.0%} with code, "
            f"{prompts['second_turns']:.0%} second turns; {topics}"
        )
    for drafter in report["drafters"]:
        lines += _judgement(drafter, answers)
    return "\n".join(lines)


def _judgement(drafter: Mapping[str, Any], answers: Mapping[str, Any]) -> Iterator[str]:
    for name, one in drafter["sets"].items():
        yield (
            f"{drafter['kind']}, {name.replace('_', ' ')}: {one['tokens_per_step']:.2f} tokens a "
            f"step ({one['tokens_per_step_before']:.2f} without it), {one['speed']:.2f} times "
            f"plain decoding ({one['speed_before']:.2f}), {one['answers']} answers"
        )
    if drafter["installed"]:
        yield f"{drafter['kind']} is installed: `auto` takes it from now on"
    else:
        yield (
            f"{drafter['kind']} is not installed: `auto` gains less than 1 % by it, or too few "
            "answers are held out; learning longer may change that"
        )
