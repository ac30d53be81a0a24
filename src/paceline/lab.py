"""The commands that measure and check: bench, verify, plan.

As in `cli.py`: each parses, calls, prints. What they call is imported when they run.
"""

import argparse

from paceline.console import check_writable, load_model, named, print_report, progress_of


def bench_run(options: argparse.Namespace) -> int:
    """`bench run`."""
    from paceline.bench import commands

    check_writable(options.output)
    report = commands.bench_run(
        lambda rows: load_model(options, rows=rows),
        suite=options.suite,
        kinds=options.kind or [],
        per_kind=options.per_kind,
        drafters=options.drafter or ["auto"],
        policy=options.policy,
        rounds=options.rounds,
        max_tokens=options.max_tokens,
        progress=progress_of(options),
    )
    return print_report(report, options)


def bench_serve(options: argparse.Namespace) -> int:
    """`bench serve`."""
    from paceline.bench import commands

    check_writable(options.output)
    report = commands.bench_serve(
        **named(options, "url", "model", "requests", "suite", "max_tokens", "extra"),
        key=options.api_key,
        clients=options.clients or ([] if options.rate else [1, 8]),
        rates=options.rate or [],
        kinds=options.kind or [],
        progress=progress_of(options),
    )
    return print_report(report, options)


def verify(options: argparse.Namespace) -> int:
    """`verify`."""
    from paceline.bench import commands

    check_writable(options.output)
    report = commands.verify(
        lambda: load_model(options),
        suite=options.suite,
        max_tokens=options.max_tokens,
        whole=options.whole,
        drafters=options.drafter or [],
        progress=progress_of(options),
    )
    return print_report(report, options)


def plan(options: argparse.Namespace) -> int:
    """`plan`."""
    from paceline.bench import commands

    return print_report(commands.plan(load_model(options), again=options.again), options)
