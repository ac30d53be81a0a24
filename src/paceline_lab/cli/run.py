"""`paceline bench run`: drafters against plain decoding on a suite of prompts."""

from dataclasses import replace
from typing import Annotated

from typer import Option

from paceline.cli.console import load_model, print_report
from paceline.cli.options import ModelOptions, Output, Seed, command
from paceline.errors import InvalidRequest
from paceline.options import RANGES, Options
from paceline.storage.report import Report
from paceline_lab.cli.options import TOKENS, Drafters, MeasurementArguments, measuring

_MAX_PRINTED = 64
"""Maximum printed cases; only the result file has all rows of a longer run."""


@command(
    examples=(
        "paceline bench run --drafter auto --drafter ngram",
        "paceline bench run --suite questions.jsonl --limit 60 --rounds 1 --output run.json",
        "paceline bench run --suite seeds",
    ),
)
def run(
    *,
    drafter: Drafters,
    policy: Annotated[str, Option(help="auto, fixed, adaptive or kelly")] = "auto",
    temperature: Annotated[float, Option(parser=RANGES["temperature"], help="0 is greedy")] = 0.0,
    seed: Seed = 0,
    measurement: MeasurementArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Compare drafters with plain decoding on a suite."""
    from paceline.runtime.request import check
    from paceline_lab.bench.ab_test import (
        PLAIN,
        SINGLE_ROW,
        Case,
        Contender,
        about,
        drafter_name,
        has_single_rows,
        max_context,
        measure,
    )
    from paceline_lab.bench.journal import open_journal
    from paceline_lab.bench.record import Record
    from paceline_lab.bench.summary import (
        all_same_tokens,
        case_table,
        group_tables,
        notes,
        summary,
    )
    from paceline_lab.bench.turns import PromptTurn, chosen_prompts, measure_turns
    from paceline_lab.sweep.seeds import NAME, seeds_report

    rounds, tokens, result = measurement.rounds, measurement.max_tokens, measurement.output
    limit, progress = measurement.limit, measuring(output)
    if measurement.suite == NAME and not NAME.exists():
        others = {
            **{"policy": policy != "auto", "temperature": temperature, "seed": seed},
            **{"limit": limit, "max-tokens": tokens != TOKENS},
        }
        if names := [f"--{name}" for name, is_set in others.items() if is_set]:
            raise InvalidRequest(f"the suite seeds has its own {', '.join(names)}; remove it")
        report = seeds_report(
            lambda rows: load_model(model, output, drafters=drafter or ["ngram"], min_rows=rows),
            drafters=drafter,
            rounds=rounds,
            output=result,
            progress=progress,
        )
        return print_report(report, output, result, journal=True)
    drafter = drafter or ["auto"]
    prompts = chosen_prompts(measurement.suite, limit)
    sampling: Options = {"temperature": temperature, "seed": seed} if temperature else {}
    options: Options = {"max_tokens": tokens, **sampling}
    for name in drafter:
        check({**options, "drafter": name, "policy": policy})
    loaded = load_model(model, output, drafters=drafter, min_rows=2)
    loaded.measured_costs()
    contenders = [Contender(PLAIN, loaded, {"drafter": "none"})]
    if has_single_rows(loaded, default=True):
        single = load_model(model, output, drafters=drafter, min_rows=1)
        contenders.append(Contender(SINGLE_ROW, single, {"drafter": "none"}))
    contenders += [
        Contender(drafter_name(n), loaded, {"drafter": n, "policy": policy}) for n in drafter
    ]
    head = Record(
        "run",
        rows=[],
        settings={
            "drafters": [drafter_name(name) for name in drafter],
            "policy": policy,
            "rounds": rounds,
            "max_tokens": tokens,
            "prompts": len(prompts.prompts),
            **({} if limit is None else {"limit": limit}),
            **sampling,
        },
        suite_sha256=prompts.sha256,
        **about(loaded),
    )

    def case(turn: PromptTurn) -> Case:
        category = turn.prompt.category
        return Case(
            turn.name,
            turn.prompt.kind,
            turn.tokens,
            options,
            facts={"category": category, "turn": turn.number} if category else {},
            keep_prompt=not category,
        )

    with open_journal(result, head, progress) as measured:
        rows, skipped = measure_turns(
            prompts.prompts,
            loaded,
            room=min(max_context(contender.model) for contender in contenders),
            max_tokens=tokens,
            warm_up=lambda turn: [contender.answer(case(turn)) for contender in contenders],
            measure=lambda turn, place: measure(case(turn), contenders, rounds=rounds, start=place),
            measured=measured,
            progress=progress,
        )
    skips = {"skipped": [turn._asdict() for turn in skipped]}
    record = replace(head, rows=rows, summary={**summary(rows), **skips})
    tables = group_tables(rows)
    if len(record.cases) <= _MAX_PRINTED:
        tables.append(case_table(rows))
    text = "\n".join([*map(str, skipped), *notes(rows)])
    report = Report(record.as_dict(), all_same_tokens(rows), text, tables)
    return print_report(report, output, result, journal=True)
