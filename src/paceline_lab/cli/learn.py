"""`paceline learn`: a drafter for a model, from the model's own prompts and answers.

A table is counted from the answers, and `auto` uses it if that is faster.
"""

import shutil
from contextlib import ExitStack
from math import inf
from pathlib import Path
from time import monotonic
from typing import Annotated

from typer import Option

from paceline.cli import declare
from paceline.cli.console import obey_offline, print_report, progress_of
from paceline.cli.options import ModelArgument, Offline, Output, command
from paceline.errors import InvalidRequest
from paceline.options import FloatRange
from paceline.storage.report import Report
from paceline.system.machine import lower_priority

_DATA_SHARE = 0.9
"""Share of the time for prompts and answers; the table takes the rest."""

_JSON_BYTES = 12
"""Bytes on disk per answer token, its prompt and the prompt's text included."""


@command(
    examples=(
        "paceline learn qwen3-0.6b  # overnight",
        "paceline learn --hours 1",
        "paceline forget  # deletes learned drafters",
    ),
)
def learn(
    *,
    model: ModelArgument,
    hours: Annotated[float, Option(parser=FloatRange(0, 10_000, open=True), help="at most")] = 8.0,
    tokens: Annotated[
        int | None, declare.count(help="tokens to learn from, instead of a time")
    ] = None,
    prompts: Annotated[
        list[Path],
        declare.several(parser=Path, metavar="FILE", help="JSON lines to answer first"),
    ],
    exclude: Annotated[
        list[Path],
        declare.several(parser=Path, metavar="FILE", help="JSON lines of prompts to exclude"),
    ],
    engine: Annotated[str, Option(help="auto, llamacpp or mlx")] = "auto",
    offline: Offline = False,
    output: Output,
) -> int:
    """Learn to draft for a model.

    The model writes prompts and answers them; a table is counted from the answers. `auto` takes it
    if that makes other answers faster, and never changes one. Run it again to continue.
    """
    from paceline.runtime.load import load
    from paceline.storage.files import locked
    from paceline.verify.suite import load_suite
    from paceline_lab.learn.data import AT_ONCE, CACHE_TOKENS, DataMaker, variety_of
    from paceline_lab.learn.folder import LearnedFolder
    from paceline_lab.learn.openings import openings
    from paceline_lab.learn.table import Use, learn_table, text_of

    obey_offline(offline)
    began, progress = monotonic(), progress_of(output)
    suites = [load_suite(), *map(load_suite, exclude)]
    given = [load_suite(path) for path in prompts]
    seconds = inf if tokens else hours * 3600
    with load(model, engine=engine, progress=progress) as used:
        use = Use(used.files, used.engine.vocab_size, used.measured_costs())
        # A second row per sequence would halve the throughput, and training texts do not need exact
        # decoding.
        rows = 2 if getattr(used.engine, "single_row_fault", "") else 1
    with load(
        model,
        engine=engine,
        min_rows=rows,
        cache_tokens=CACHE_TOKENS,
        contexts=AT_ONCE,
        drafters=("none",),
        progress=progress,
    ) as target:
        cost = target.measured_costs()  # saved for all uses of the model: at full priority
        lower_priority()
        if not given:
            openings(target.files)  # fails before anything is written
        folder = LearnedFolder(target.files)
        with locked(folder.path), ExitStack() as stack:
            stopped = "progress is saved; the same command continues from there"
            stack.push(lambda kind, *_: progress.note(stopped) if kind else None)
            progress.note(_notice(folder.path, seconds, tokens, AT_ONCE / cost(AT_ONCE), model))
            variety = variety_of(folder, suites)
            left = _DATA_SHARE * seconds - (monotonic() - began)
            maker = DataMaker(
                target, folder, variety, seconds=left, tokens=tokens, progress=progress
            )
            maker.run(given)
            target.close()  # frees its memory for the table
            value = learn_table(folder, use, [use.files, target.files], variety, progress)
    value["seconds"] = monotonic() - began
    return print_report(Report(value, text=text_of(value)), output)


def _notice(folder: Path, seconds: float, tokens: int | None, rate: float, model: str) -> str:
    """Return a notice of the time and disk space to use, at `rate` tokens per second.

    Raises InvalidRequest if the disk has less free space.
    """
    from paceline.storage.files import megabytes, writing
    from paceline_lab.learn.table import TABLE_BYTES

    expected = tokens or int(seconds * _DATA_SHARE * rate)
    needed = expected * _JSON_BYTES + 2 * TABLE_BYTES
    with writing(folder):
        free = shutil.disk_usage(folder).free
    if free < needed:
        raise InvalidRequest(
            f"{folder} may get {megabytes(needed)} and its disk has {megabytes(free)} free; "
            "free some, or learn for less: --hours, --tokens"
        )
    hours = (tokens / rate if tokens else seconds) / 3600
    return (
        f"learning from {model} for about {hours:.2g} h, at the lowest priority: at most "
        f"{megabytes(needed)} in {folder}; nothing of it leaves this machine, and "
        "`paceline forget` removes it. It may be stopped at any time; the same command continues"
    )
