"""`bench run`: drafters against plain decoding on a suite of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.bench.output import Report
from paceline.bench.paired import (
    PLAIN,
    SINGLE_ROW,
    Case,
    Contender,
    about,
    called,
    measure_all,
    warm_up,
)
from paceline.bench.record import Record, here
from paceline.bench.resume import journal_of, resuming
from paceline.bench.suite import load_suite
from paceline.bench.summary import by_case, by_kind, same, summary
from paceline.models import Progress
from paceline.options import check
from paceline.runtime import Model


def bench_run(
    load: Callable[[int], Model],
    *,
    suite: Path | None,
    kinds: Sequence[str],
    per_kind: int | None,
    drafters: Sequence[str],
    policy: str,
    rounds: int,
    max_tokens: int,
    output: Path | None = None,
    progress: Progress,
) -> Report:
    """Plain decoding, single-row plain decoding and the drafters on a suite, in turns.

    `load` opens the model with so many rows a call at least. What has been measured is kept beside
    `output` until it is written.
    """
    prompts = load_suite(suite).only(kinds, per_kind)
    for name in drafters:
        check({"drafter": name, "policy": policy})
    model = load(2)
    model.measure()
    contenders = [
        Contender(PLAIN, model, {"drafter": "none"}),
        Contender(SINGLE_ROW, load(1), {"drafter": "none"}),
        *(Contender(called(name), model, {"drafter": name, "policy": policy}) for name in drafters),
    ]
    head = Record(
        "run",
        rows=[],
        settings={
            "drafters": [each.name for each in contenders[2:]],
            "policy": policy,
            "rounds": rounds,
            "max_tokens": max_tokens,
            "prompts": len(prompts.prompts),
            "kinds": [*kinds],
        },
        suite_sha256=prompts.sha256,
        **about(model),
        **here(),
    )
    cases = [
        Case(prompt.id, prompt.kind, prompt.messages, {"max_tokens": max_tokens})
        for prompt in prompts.prompts
    ]
    with resuming(output, head) as kept:
        warm_up(contenders, cases[0])
        rows = measure_all(cases, contenders, rounds=rounds, kept=kept, progress=progress)
    record = replace(head, rows=rows, summary=summary(rows))
    tables = [by_kind(rows), by_case(rows)]
    return Report(record.as_dict(), same(rows), tables=tables, journal=journal_of(output))
