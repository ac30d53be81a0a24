"""`paceline bench sweep`."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from paceline.cli import declare, numbers
from paceline.cli.console import load_model, print_report
from paceline.cli.options import MaxTokens, ModelOptions, Output, command, group
from paceline_lab.cli.options import ComparisonArguments, MeasurementArguments, Rounds, measuring

app = group()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepArguments(MeasurementArguments):
    """A measurement with the defaults of a sweep."""

    rounds: Rounds = 5
    per_kind: Annotated[
        int | None, declare.count(help="with --depth: N of each kind; default: 1")
    ] = None
    max_tokens: MaxTokens = 80


@command(
    app,
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
            parser=numbers.WholeOr(1, "max", "max", "max"),
            metavar="TOKENS",
            help="tokens of a text of code, or max; may be repeated; "
            "default: 100, 200, 372, 800, 1600, ... max",
        ),
    ],
    depth: Annotated[
        list[Any],
        declare.several(
            parser=numbers.WholeOr(0, "max", "max", "max"),
            metavar="TOKENS",
            help="tokens before the suite's questions instead, or max; may be repeated",
        ),
    ],
    comparison: ComparisonArguments,
    measurement: SweepArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Compare by prompt length, or by context depth, and more."""
    from paceline_lab.sweep.command import bench_sweep

    report = bench_sweep(
        lambda: load_model(model, output, drafters=comparison.drafters),
        **asdict(comparison),
        **asdict(measurement),
        lengths=length,
        depths=depth,
        progress=measuring(output),
    )
    return print_report(report, output, measurement.output)
