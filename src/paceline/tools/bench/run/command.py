"""`bench run`: drafters against plain decoding on a suite of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.runtime.options import check
from paceline.storage.report import Report
from paceline.tools.bench.ab_test import PLAIN, SINGLE_ROW, Variant, about, called
from paceline.tools.bench.journal import journal_path, open_journal
from paceline.tools.bench.record import Record, here
from paceline.tools.bench.run.groups import group_summary, group_tables, notes
from paceline.tools.bench.run.turns import ask, check_names
from paceline.tools.bench.summary import by_case, by_kind, same, summary
from paceline.tools.suite import load_suite

_SHOWN = 64
"""Cases that are printed one by one; of more, the result file has them."""


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
    limit: int | None = None,
    output: Path | None = None,
    progress: Progress,
) -> Report:
    """Plain decoding, single-row plain decoding and the drafters on a suite, in turns.

    All greedy. `load` opens the model with so many rows a call at least. What has been measured is
    kept beside `output` until it is written.

    Raises:
        InvalidRequest: an option or the suite cannot be used, or no prompt fits the context.
    """
    prompts = load_suite(suite).only(kinds, per_kind, limit)
    check_names(prompts.prompts)
    for name in drafters:
        check({"drafter": name, "policy": policy})
    model = load(2)
    model.measure()
    variants = [
        Variant(PLAIN, model, {"drafter": "none"}),
        Variant(SINGLE_ROW, load(1), {"drafter": "none"}),
        *(Variant(called(name), model, {"drafter": name, "policy": policy}) for name in drafters),
    ]
    head = Record(
        "run",
        rows=[],
        settings={
            "drafters": [each.name for each in variants[2:]],
            "policy": policy,
            "rounds": rounds,
            "max_tokens": max_tokens,
            "prompts": len(prompts.prompts),
            "kinds": [*kinds],
            **({} if limit is None else {"limit": limit}),
        },
        suite_sha256=prompts.sha256,
        **about(model),
        **here(),
    )
    with open_journal(output, head) as kept:
        rows, skipped = ask(
            prompts.prompts,
            variants,
            max_tokens=max_tokens,
            rounds=rounds,
            kept=kept,
            progress=progress,
        )
    found = {
        **summary(rows),
        **group_summary(rows),
        "skipped": [each._asdict() for each in skipped],
    }
    record = replace(head, rows=rows, summary=found)
    tables = [by_kind(rows), *group_tables(rows)]
    if len(record.cases) <= _SHOWN:
        tables.append(by_case(rows))
    text = "\n".join([*map(str, skipped), *notes(rows)])
    return Report(record.as_dict(), same(rows), text, tables, journal_path(output))
