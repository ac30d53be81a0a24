"""Implements `learn`: prompts, answers, and a table of them, which `auto` takes if it gains."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from time import monotonic

from paceline.decoding.costs import CostTable
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.runtime.load import load
from paceline.storage.files import held, megabytes, writing
from paceline.storage.report import Report
from paceline.system.machine import lower_priority
from paceline.verify.suite import Suite, load_suite
from paceline_lab.learn.data import AT_ONCE, CACHE_TOKENS, DataMaker
from paceline_lab.learn.folder import LearntFolder
from paceline_lab.learn.openings import openings
from paceline_lab.learn.table import TABLE_BYTES, Use, learn_table, text_of
from paceline_lab.learn.variety import Variety

_DATA_SHARE = 0.9
"""Of the time, for prompts and answers; the table takes the rest."""

_JSON_BYTES = 12
"""Of a token of an answer on disk, its prompt and the prompt's text included."""


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
    """Learn a table for a model, from where an earlier call was stopped.

    `engine` is the one that the table is for; `tokens` of answers replace `hours`.

    Raises:
        ModelError: the model cannot be loaded, cannot write prompts, or has changed since.
        InvalidRequest: a file cannot be read or written, the disk is too full, or another run
            learns from this model.
    """
    began = monotonic()
    suites = [load_suite(), *map(load_suite, exclude)]
    given = [load_suite(path) for path in prompts]
    seconds = inf if tokens else hours * 3600
    with load(model, engine=engine, progress=progress) as used:
        use = Use(used.files, used.engine.vocab_size, used.measured_costs())
    # A second row of each sequence would halve the throughput, and texts to learn from need no
    # exact decoding.
    with load(
        model,
        engine=engine,
        rows=1,
        cache_tokens=CACHE_TOKENS,
        contexts=AT_ONCE,
        drafters=("none",),
        progress=progress,
    ) as target:
        cost = target.measured_costs()  # kept for all who use the model, at whatever priority
        lower_priority()
        if not given:
            openings(target.files)  # refused before anything is written
        folder = LearntFolder(target.files)
        with held(folder.path), _said_if_stopped(progress):
            progress.say(_notice(folder, seconds, tokens, cost, model))
            variety = variety_of(folder, suites)
            left = _DATA_SHARE * seconds - (monotonic() - began)
            maker = DataMaker(
                target, folder, variety, seconds=left, tokens=tokens, progress=progress
            )
            maker.run(given)
            target.close()  # its memory is for what comes next
            report = learn_table(folder, use, [use.files, target.files], variety, progress)
    report["seconds"] = monotonic() - began
    return Report(report, text=text_of(report))


def variety_of(folder: LearntFolder, suites: Iterable[Suite]) -> Variety:
    """The prompts of earlier calls; those of suites are excluded, paceline's own among them."""
    prompts = [prompt for suite in suites for prompt in suite.prompts]
    first = [str(one.get("content", "")) for prompt in prompts for one in prompt.messages]
    variety = Variety([*first, *(turn for prompt in prompts for turn in prompt.turns)])
    for answer in folder.answers():
        if answer.seed is not None:
            variety.add(answer.texts[-1], answer.kind)
    return variety


def _notice(
    folder: LearntFolder, seconds: float, tokens: int | None, cost: CostTable, model: str
) -> str:
    """What learning will cost. Raises InvalidRequest if the disk has less free."""
    rate = AT_ONCE / cost(AT_ONCE)
    expected = tokens or int(seconds * _DATA_SHARE * rate)
    needed = expected * _JSON_BYTES + 2 * TABLE_BYTES
    with writing(folder.path):
        free = shutil.disk_usage(folder.path).free
    if free < needed:
        raise InvalidRequest(
            f"{folder.path} may get {megabytes(needed)} and its disk has {megabytes(free)} free; "
            "free some, or learn for less: --hours, --tokens"
        )
    time = f"about {duration(tokens / rate)}" if tokens else duration(seconds)
    return (
        f"learning from {model} for {time}, at the lowest priority: at most {megabytes(needed)} in "
        f"{folder.path}; nothing of it leaves this machine, and `paceline forget` removes it. It "
        "may be stopped at any time; the same command goes on"
    )


def duration(seconds: float) -> str:
    """Seconds for people, as in 7 h 20 min."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours else f"{minutes} min"


@contextmanager
def _said_if_stopped(progress: Progress) -> Iterator[None]:
    try:
        yield
    except BaseException:
        progress.say("what was learnt so far is kept; the same command goes on from there")
        raise
