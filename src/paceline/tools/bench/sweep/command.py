"""`bench sweep`: plain decoding against drafters and policies, over lengths, depths, temperatures.

One process, in which the model stays loaded. First each way's first request after loading (cold),
on its own; then, when all have answered once, every case in turns (warm).
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.runtime.options import Options, check
from paceline.storage.report import Report
from paceline.tools.bench.ab_test import (
    PLAIN,
    Case,
    Variant,
    about,
    called,
    measure_all,
    measures_of,
    warm_up,
)
from paceline.tools.bench.journal import journal_path, open_journal
from paceline.tools.bench.record import Record, Row, here
from paceline.tools.bench.summary import by_case, cold_table, same, summary
from paceline.tools.bench.sweep.cases import Place, dense_text, depth_cases, length_cases
from paceline.tools.suite import load_suite

COLD = "cold"


def bench_sweep(
    load: Callable[[], Model],
    *,
    lengths: Sequence[Place],
    text: Path | None,
    depths: Sequence[Place],
    suite: Path | None,
    kinds: Sequence[str],
    per_kind: int | None,
    drafters: Sequence[str],
    policies: Sequence[str],
    blocks: Sequence[int],
    temperatures: Sequence[float],
    seed: int,
    rounds: int,
    max_tokens: int,
    output: Path | None = None,
    progress: Progress,
) -> Report:
    """Plain decoding and every drafter with every policy, over lengths, or over depths.

    Args:
        load: opens the model.
        lengths: of the tiled text, in tokens; with no depths either: the experiment's, and on.
        text: what is tiled; None: paceline's own.
        depths: tokens in front of the suite's questions.
        suite: the file of these; None: paceline's own.
        kinds: of these questions, all when empty; only with depths.
        per_kind: so many of each kind; None: one.
        drafters: who drafts.
        policies: `auto`, or a rule with its block: `fixed:8`, `kelly:16`.
        blocks: for policies that do not say theirs.
        temperatures: none: greedy.
        seed: of the sampling.
        rounds: how often each answers each prompt.
        max_tokens: of each answer.
        output: where the result will be; what was measured is kept beside it until then.
        progress: told how far it is.

    Raises:
        InvalidRequest: a value is out of range, or two do not go together.
    """
    if depths and (lengths or text):
        raise InvalidRequest("--depth does not go with --length or --text: sweep one at a time")
    if not depths and (suite or kinds or per_kind):
        raise InvalidRequest("--suite, --kind and --per-kind are for --depth")
    options = ways(drafters, policies, blocks)
    sampled: list[Options] = [{"temperature": value, "seed": seed} for value in temperatures]
    for each in [*options.values(), *sampled]:
        check(each)
    prompts, content, digest = None, "", ""
    if depths:
        prompts = load_suite(suite).only(kinds, per_kind or 1)
    else:
        content, digest = dense_text(text)
    model = load()
    model.measure()
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
            "contenders": {
                name: {**each, "drafter": called(each["drafter"])} for name, each in options.items()
            },
            "seed": seed,
            "rounds": rounds,
            "max_tokens": max_tokens,
        },
        suite_sha256=prompts.sha256 if prompts else digest,
        **about(model),
        **here(),
    )
    with open_journal(output, head) as kept:
        if kept.get(COLD) is None:
            del model
            first, model = _cold(load, options, cases[0], progress)
            kept.add(COLD, first)
        variants = [Variant(name, model, each) for name, each in options.items()]
        warm_up(variants, cases[0])
        warm = measure_all(cases, variants, rounds=rounds, kept=kept, progress=progress)
        cold = kept.get(COLD) or []
    record = replace(head, rows=[*cold, *warm], summary=summary(warm))
    tables = [by_case(warm), cold_table(cold)]
    return Report(record.as_dict(), same(warm), tables=tables, journal=journal_path(output))


def ways(
    drafters: Sequence[str], policies: Sequence[str], blocks: Sequence[int]
) -> dict[str, Options]:
    """Contender -> its options: plain decoding, then each drafter with each policy and block.

    Raises:
        InvalidRequest: what stands behind a policy's colon is no number.
    """
    found: dict[str, Options] = {PLAIN: {"drafter": "none"}}
    for drafter in drafters or ["auto"]:
        for policy in policies or (["fixed"] if blocks else ["auto"]):
            rule, colon, rows = policy.partition(":")
            if colon and not rows.isdecimal():
                raise InvalidRequest(
                    f"policy {policy!r} has no block; expected a number of rows, as in {rule}:8"
                )
            said: list[int | None] = [int(rows)] if colon else [*blocks] or [None]
            for block in said:
                options: Options = {"drafter": drafter, "policy": rule, "max_block": block}
                name = called(drafter)
                if rule != "auto" or block:
                    name += f", {rule}{f' {block}' if block else ''}"
                found[name] = options
    return found


def _cold(
    load: Callable[[], Model], options: Mapping[str, Options], case: Case, progress: Progress
) -> tuple[list[Row], Model]:
    """Each way's first request after loading, and the model that was loaded last."""
    rows = []
    model: Any = None
    with progress.task("first requests after loading", len(options), unit="requests") as reach:
        for number, (name, each) in enumerate(options.items(), start=1):
            model = None  # not two of them in memory
            gc.collect()
            model = load()
            result = Variant(name, model, each).answer(case)
            found = {"load_seconds": model.load_seconds, **measures_of(result)}
            rows.append(
                Row(
                    f"{case.id}, {COLD}",
                    case.kind,
                    name,
                    {measure: [value] for measure, value in found.items()},
                    at={**case.at, "state": COLD},
                    facts={
                        "tokens": result.completion_tokens,
                        "prompt_tokens": result.prompt_tokens,
                    },
                )
            )
            reach(number)
    return rows, model
