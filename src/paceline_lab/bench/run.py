"""`bench run`: drafters against plain decoding on a suite of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.models import Progress
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.runtime.request import check
from paceline.storage.report import Report
from paceline_lab.bench.ab_test import (
    PLAIN,
    SINGLE_ROW,
    Case,
    Contender,
    about,
    drafter_name,
    max_context,
    measure,
    warm_up,
)
from paceline_lab.bench.journal import open_journal
from paceline_lab.bench.prompts import chosen_prompts
from paceline_lab.bench.record import Record
from paceline_lab.bench.summary import all_same_tokens, case_table, group_tables, notes, summary
from paceline_lab.bench.turns import PromptTurn, measure_turns
from paceline_lab.journals import journal_path

_MAX_PRINTED = 64
"""Cases. Of a longer run only the result file has the rows."""


def bench_run(
    load: Callable[[int], Model],
    *,
    drafters: Sequence[str],
    policy: str,
    rounds: int,
    max_tokens: int,
    kinds: Sequence[str] = (),
    per_kind: int | None = None,
    suite: Path | None = None,
    output: Path | None = None,
    limit: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress,
) -> Report:
    """Plain decoding, single-row plain decoding and the drafters on a suite, interleaved.

    All answers are greedy, or sampled with the same seed. `load` opens the model with at least that
    number of rows per call; rows are journaled beside `output` until it is written. Raises
    InvalidRequest if an option or the suite is invalid, or no prompt fits the context.
    """
    prompts = chosen_prompts(suite, kinds, per_kind, limit)
    sampling: Options = {"temperature": temperature, "seed": seed} if temperature else {}
    options: Options = {"max_tokens": max_tokens, **sampling}
    for name in drafters:
        check({**options, "drafter": name, "policy": policy})
    model = load(2)
    model.measured_costs()
    contenders = [
        Contender(PLAIN, model, {"drafter": "none"}),
        Contender(SINGLE_ROW, load(1), {"drafter": "none"}),
        *(Contender(drafter_name(n), model, {"drafter": n, "policy": policy}) for n in drafters),
    ]
    head = Record(
        "run",
        rows=[],
        settings={
            "drafters": [contender.name for contender in contenders[2:]],
            "policy": policy,
            "rounds": rounds,
            "max_tokens": max_tokens,
            "prompts": len(prompts.prompts),
            "kinds": [*kinds],
            **({} if limit is None else {"limit": limit}),
            **sampling,
        },
        suite_sha256=prompts.sha256,
        **about(model),
    )
    with open_journal(output, head) as journal:
        rows, skipped = measure_turns(
            prompts.prompts,
            model,
            room=min(max_context(contender.model) for contender in contenders),
            max_tokens=max_tokens,
            warm_up=lambda turn: warm_up(contenders, _case(turn, options)),
            measure=lambda turn, place: measure(
                _case(turn, options), contenders, rounds=rounds, start=place
            ),
            journal=journal,
            progress=progress,
        )
    skips = {"skipped": [turn._asdict() for turn in skipped]}
    record = replace(head, rows=rows, summary={**summary(rows), **skips})
    tables = group_tables(rows)
    if len(record.cases) <= _MAX_PRINTED:
        tables.append(case_table(rows))
    text = "\n".join([*map(str, skipped), *notes(rows)])
    return Report(record.as_dict(), all_same_tokens(rows), text, tables, journal_path(output))


def _case(turn: PromptTurn, options: Options) -> Case:
    category = turn.prompt.category
    return Case(
        turn.name,
        turn.prompt.kind,
        turn.tokens,
        options,
        facts={"category": category, "turn": turn.number} if category else {},
        keep_prompt=not category,
    )
