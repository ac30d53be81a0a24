"""`paceline bench sweep`: plain decoding against drafters and policies, over lengths or depths.

One process runs everything: after a warm-up, every case with all contenders interleaved.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from paceline.cli import declare
from paceline.cli.console import load_model, print_report
from paceline.cli.options import MaxTokens, ModelOptions, Output, command
from paceline.errors import InvalidRequest
from paceline.storage.report import Report
from paceline_lab.cli.options import ComparisonArguments, MeasurementArguments, Rounds, measuring

_QUESTIONS = 8
"""Questions per depth, by default: one of each kind of the built-in suite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepArguments(MeasurementArguments):
    """A measurement with the defaults of a sweep."""

    rounds: Rounds = 5
    max_tokens: MaxTokens = 80


@command(
    examples=(
        "paceline bench sweep --length 372 --length max --rounds 3",
        "paceline bench sweep --depth 0 --depth 2048 --output depths.json",
    ),
)
def sweep(
    *,
    length: Annotated[
        list[Any],
        declare.several(
            parser=declare.IntOrKeyword(1, "max", "max", "max"),
            metavar="TOKENS",
            help="prompt length in tokens, or max; may be repeated; "
            "default: 100, 200, 372, 800, 1600, ... max",
        ),
    ],
    depth: Annotated[
        list[Any],
        declare.several(
            parser=declare.IntOrKeyword(0, "max", "max", "max"),
            metavar="TOKENS",
            help="context depth instead: tokens before the suite's questions, or max; may be "
            "repeated",
        ),
    ],
    comparison: ComparisonArguments,
    measurement: SweepArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Compare drafters over prompt lengths or context depths."""
    from paceline_lab.bench.ab_test import contender_options, has_single_rows, options_facts
    from paceline_lab.bench.record import Record
    from paceline_lab.bench.summary import all_same_tokens, case_table, verdicts
    from paceline_lab.bench.turns import chosen_prompts
    from paceline_lab.sweep.cases import dense_text, depth_cases, length_cases, measured
    from paceline_lab.sweep.seeds import DEPTHS

    rounds, tokens, result = measurement.rounds, measurement.max_tokens, measurement.output
    suite, limit = measurement.suite, measurement.limit
    if depth and length:
        raise InvalidRequest("--depth cannot be used with --length; sweep one at a time")
    if not depth and (suite or limit):
        raise InvalidRequest("--suite and --limit are for --depth")
    options = contender_options(comparison.drafters, comparison.policies, comparison.blocks)
    prompts = chosen_prompts(suite, limit or _QUESTIONS) if depth else None
    text, digest = dense_text()
    loaded = load_model(model, output, drafters=comparison.drafters)
    loaded.measured_costs()
    single = None
    if has_single_rows(loaded, default=False):
        single = load_model(model, output, drafters=comparison.drafters, min_rows=1)
    cases = (
        depth_cases(loaded, prompts, depth, tokens)
        if prompts
        else length_cases(loaded, text, length, tokens)
    )
    settings = {
        "cases": [case.id for case in cases],
        "contenders": options_facts(options),
        "rounds": rounds,
        "max_tokens": tokens,
    }
    head = Record("sweep", [], settings, suite_sha256=prompts.sha256 if prompts else digest)
    record = measured(
        head,
        loaded,
        options,
        cases,
        single=single,
        rounds=rounds,
        output=result,
        progress=measuring(output),
    )
    report = Report(
        record.as_dict(),
        all_same_tokens(record.rows),
        "\n".join(verdicts(record.rows)),
        tables=[case_table(record.rows), *([DEPTHS] if depth else [])],
    )
    return print_report(report, output, result, journal=True)
