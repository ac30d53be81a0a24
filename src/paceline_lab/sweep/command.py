"""`bench sweep`: plain decoding against drafters and policies, over lengths or depths.

All in one process: after a warm-up, every case with all contenders interleaved.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.runtime.request import check
from paceline.storage.report import Report
from paceline_lab.bench.ab_test import (
    Case,
    Contender,
    about,
    contender_options,
    measure_all,
    options_facts,
    warm_up,
)
from paceline_lab.bench.journal import open_journal
from paceline_lab.bench.prompts import chosen_prompts
from paceline_lab.bench.record import Record
from paceline_lab.bench.summary import all_same_tokens, case_table, summary
from paceline_lab.journals import journal_path
from paceline_lab.sweep.cases import TokenCount, dense_text, depth_cases, length_cases


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
    depths: Sequence[TokenCount] = (),
    progress: Progress,
) -> Report:
    """Plain decoding and every drafter with every policy, over prompt lengths or context depths.

    A length is the prompt's tokens of a tiled text (without depths either: `default_lengths`); a
    depth is the tokens of context before the suite's questions, one of each kind by default. A
    policy is `auto`, or a rule with its block, as `fixed:8`; `blocks` are for policies without one.
    Raises InvalidRequest if a value is out of range, or two options exclude each other.
    """
    if depths and lengths:
        raise InvalidRequest("--depth does not go with --length: sweep one at a time")
    if not depths and (suite or kinds or per_kind):
        raise InvalidRequest("--suite, --kind and --per-kind are for --depth")
    options = contender_options(drafters, policies, blocks)
    for chosen in options.values():
        check(chosen)
    prompts, content, digest = None, "", ""
    if depths:
        prompts = chosen_prompts(suite, kinds, per_kind or 1)
    else:
        content, digest = dense_text()
    model = load()
    model.measured_costs()
    cases = (
        depth_cases(model, prompts, depths, max_tokens)
        if prompts
        else length_cases(model, content, lengths, max_tokens)
    )
    settings = {
        "cases": [case.id for case in cases],
        "contenders": options_facts(options),
        "rounds": rounds,
        "max_tokens": max_tokens,
    }
    head = Record("sweep", [], settings, suite_sha256=prompts.sha256 if prompts else digest)
    record = measured(head, model, options, cases, rounds=rounds, output=output, progress=progress)
    return Report(
        record.as_dict(),
        all_same_tokens(record.rows),
        tables=[case_table(record.rows)],
        journal=journal_path(output),
    )


def measured(
    head: Record,
    model: Model,
    options: Mapping[str, Options],
    cases: Sequence[Case],
    *,
    rounds: int,
    output: Path | None,
    progress: Progress,
) -> Record:
    """The record that `head` begins, of all cases by contenders with these options."""
    head = replace(head, **about(model))
    with open_journal(output, head) as journal:
        contenders = [Contender(name, model, settings) for name, settings in options.items()]
        warm_up(contenders, cases[0])
        rows = measure_all(cases, contenders, rounds=rounds, journal=journal, progress=progress)
    return replace(head, rows=rows, summary=summary(rows))
