"""`paceline bench run`."""

from dataclasses import asdict
from typing import Annotated

from typer import Option

from paceline.cli import numbers
from paceline.cli.console import load_model, print_report
from paceline.cli.options import ModelOptions, Output, Seed, command, group
from paceline.errors import InvalidRequest
from paceline_lab.cli.options import TOKENS, Drafters, Limit, MeasurementArguments, measuring

app = group()


@command(
    app,
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
    limit: Limit = None,
    temperature: Annotated[float, Option(parser=numbers.TEMPERATURE, help="0 is greedy")] = 0.0,
    seed: Seed = 0,
    measurement: MeasurementArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Compare drafters with plain decoding on a suite."""
    from paceline_lab.bench.run import bench_run
    from paceline_lab.sweep.seeds import NAME, bench_seeds

    if measurement.suite == NAME and not NAME.exists():
        others = {
            **{"policy": policy != "auto", "temperature": temperature, "seed": seed},
            **{"limit": limit, "kind": measurement.kinds, "per-kind": measurement.per_kind},
            "max-tokens": measurement.max_tokens != TOKENS,
        }
        if names := [f"--{name}" for name, is_set in others.items() if is_set]:
            raise InvalidRequest(f"the suite seeds has its own {', '.join(names)}; leave it out")
        report = bench_seeds(
            lambda: load_model(model, output, drafters=drafter or ["ngram"]),
            drafters=drafter,
            rounds=measurement.rounds,
            output=measurement.output,
            progress=measuring(output),
        )
        return print_report(report, output, measurement.output)
    report = bench_run(
        lambda rows: load_model(model, output, drafters=drafter, rows=rows),
        **asdict(measurement),
        limit=limit,
        temperature=temperature,
        seed=seed,
        drafters=drafter or ["auto"],
        policy=policy,
        progress=measuring(output),
    )
    return print_report(report, output, measurement.output)
