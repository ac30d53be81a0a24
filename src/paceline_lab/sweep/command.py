"""`bench sweep`: plain decoding against drafters and policies, over lengths, depths, temperatures.

All in one process. First, every contender's first request after loading the model (cold). Then,
after a warm-up, every case with all contenders interleaved (warm).
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.runtime.request import check
from paceline.storage.json_lines import journal_path
from paceline.storage.report import Report
from paceline.verify.suite import load_suite
from paceline_lab.bench.ab_test import (
    Case,
    Contender,
    about,
    contender_options,
    measure_all,
    measures_of,
    options_facts,
    warm_up,
)
from paceline_lab.bench.journal import open_journal
from paceline_lab.bench.record import Record, Row, here
from paceline_lab.bench.summary import all_same_tokens, case_table, cold_table, summary
from paceline_lab.sweep.cases import TokenCount, dense_text, depth_cases, length_cases

COLD = "cold"


def bench_sweep(
    load: Callable[[], Model],
    *,
    rounds: int,
    max_tokens: int,
    kinds: Sequence[str] = (),
    per_kind: int | None = None,
    suite: Path | None = None,
    output: Path | None = None,
    drafters: Sequence[str] = (),
    policies: Sequence[str] = (),
    blocks: Sequence[int] = (),
    lengths: Sequence[TokenCount] = (),
    text: Path | None = None,
    depths: Sequence[TokenCount] = (),
    temperatures: Sequence[float] = (),
    seed: int,
    progress: Progress,
) -> Report:
    """Plain decoding and every drafter with every policy, over prompt lengths or context depths.

    A length is the prompt's tokens of a tiled text (without depths either: `default_lengths`); a
    depth is the tokens of context before the suite's questions, one of each kind by default. A
    policy is `auto`, or a rule with its block, as `fixed:8`; `blocks` are for policies without one.
    Raises InvalidRequest if a value is out of range, or two options exclude each other.
    """
    if depths and (lengths or text):
        raise InvalidRequest("--depth does not go with --length or --text: sweep one at a time")
    if not depths and (suite or kinds or per_kind):
        raise InvalidRequest("--suite, --kind and --per-kind are for --depth")
    options = contender_options(drafters, policies, blocks)
    sampled: list[Options] = [{"temperature": value, "seed": seed} for value in temperatures]
    for settings in [*options.values(), *sampled]:
        check(settings)
    prompts, content, digest = None, "", ""
    if depths:
        prompts = load_suite(suite).only(kinds, per_kind or 1)
    else:
        content, digest = dense_text(text)
    model = load()
    model.measured_costs()
    cases = (
        depth_cases(model, prompts, depths, sampled or [{}], max_tokens)
        if prompts
        else length_cases(model, content, lengths, sampled or [{}], max_tokens)
    )
    head = Record(
        "sweep",
        rows=[],
        settings={
            "cases": [case.id for case in cases],
            "contenders": options_facts(options),
            "seed": seed,
            "rounds": rounds,
            "max_tokens": max_tokens,
        },
        suite_sha256=prompts.sha256 if prompts else digest,
        **about(model),
        **here(),
    )
    with open_journal(output, head) as journal:
        cold = journal.get(COLD, list[Row])
        if cold is None:
            del model
            cold, model = _measure_cold(load, options, cases[0], progress)
            journal.add(COLD, [row.as_dict() for row in cold])
        contenders = [Contender(name, model, settings) for name, settings in options.items()]
        warm_up(contenders, cases[0])
        warm = measure_all(cases, contenders, rounds=rounds, journal=journal, progress=progress)
    record = replace(head, rows=[*cold, *warm], summary=summary(warm))
    tables = [case_table(warm), cold_table(cold)]
    passed = all_same_tokens(warm)
    return Report(record.as_dict(), passed, tables=tables, journal=journal_path(output))


def _measure_cold(
    load: Callable[[], Model], options: Mapping[str, Options], case: Case, progress: Progress
) -> tuple[list[Row], Model]:
    """Rows of the contenders' first requests after loading, and the model that was loaded last."""
    rows = []
    model: Any = None
    with progress.task("first requests after loading", len(options), unit="requests") as reach:
        for number, (name, settings) in enumerate(options.items(), start=1):
            model = None  # not two of them in memory
            gc.collect()
            model = load()
            result = Contender(name, model, settings).answer(case)
            measures = {"load_seconds": model.load_seconds, **measures_of(result)}
            rows.append(
                Row(
                    f"{case.id}, {COLD}",
                    case.kind,
                    name,
                    {measure: [value] for measure, value in measures.items()},
                    at={**case.at, "state": COLD},
                    facts={
                        "tokens": result.completion_tokens,
                        "prompt_tokens": result.prompt_tokens,
                    },
                )
            )
            reach(number)
    return rows, model
