"""`paceline bench`: measurements."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from paceline.bench.measurement import Measurement
from paceline.cli import declare, numbers
from paceline.cli.console import check_writable, load_model, print_report, progress_of
from paceline.cli.options import (
    MaxTokens,
    ModelOptions,
    Output,
    ResultFile,
    Seed,
    Suite,
    command,
    group,
)

app = group("Measure.")

Drafters = Annotated[
    list[str], declare.several("--drafter", help="a drafter; may be repeated; default: auto")
]
Kinds = Annotated[
    list[str], declare.several("--kind", help="only this kind of prompt; may be repeated")
]
Results = Annotated[list[Path], Argument(parser=Path, metavar="FILE", help="JSON of `bench ...`")]
Limit = Annotated[
    int | None,
    declare.count(
        metavar="N",
        help="only N prompts: the same number of each kind, spread evenly over the file",
    ),
]
Rounds = Annotated[int, declare.count(help="repetitions of each measurement")]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementArguments(Measurement):
    """What is measured, on the command line."""

    rounds: Rounds = 3
    kinds: Kinds
    per_kind: Annotated[
        int | None, declare.count(help="only N prompts of each kind", metavar="N")
    ] = None
    suite: Suite = None
    max_tokens: MaxTokens = 128
    output: ResultFile = None

    def __post_init__(self) -> None:
        check_writable(self.output)


@command(
    app,
    examples=(
        "paceline bench run --drafter auto --drafter ngram",
        "paceline bench run --suite questions.jsonl --limit 60 --rounds 1 --output run.json",
    ),
)
def run(
    *,
    drafter: Drafters,
    policy: Annotated[str, Option(help="auto, fixed, adaptive or kelly")] = "auto",
    limit: Limit = None,
    temperature: Annotated[float, Option(parser=numbers.TEMPERATURE, help="0 is greedy")] = 0.0,
    seed: Seed = 0,
    measurement: MeasurementArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Compare drafters with plain decoding on a suite."""
    from paceline.bench.run.command import bench_run

    report = bench_run(
        lambda rows: load_model(model, output, drafters=drafter, rows=rows),
        measurement,
        limit=limit,
        temperature=temperature,
        seed=seed,
        drafters=drafter or ["auto"],
        policy=policy,
        progress=progress_of(output),
    )
    return print_report(report, output, measurement.output)


@command(
    app,
    examples=(
        "paceline bench compare before.json after.json",
        "paceline bench compare before.json after.json --measure decode_tokens_per_second",
    ),
)
def compare(
    *,
    results: Results,
    measure: Annotated[str, Option(help="the measure to compare")] = "ratio",
    anyway: Annotated[
        bool, Option("--anyway", help="also with another model or other prompts")
    ] = False,
    output: Output,
) -> int:
    """Put recorded results side by side."""
    from paceline.bench.compare import bench_compare

    return print_report(bench_compare(results, measure=measure, anyway=anyway), output)
