"""The commands of the workshops: Core ML models and the drafters that learn.

As in `cli.py`: each parses, calls, prints. What they call is imported when they run.
"""

import argparse
from pathlib import Path

from paceline.cli.console import named, print_report, progress_of
from paceline.errors import InvalidRequest

CORE_ML_OPTIONS = (
    *("rows", "functions", "slots", "topology", "megabytes", "head_rows", "taps", "routing"),
    *("keep", "temporary"),
)
"""Options of convert that only Core ML has."""


def convert_to_core_ml(options: argparse.Namespace) -> int:
    """`convert --to coreml`."""
    from paceline.tools.coreml import commands

    report = commands.convert(
        options.source,
        options={
            **named(options, "weights", *CORE_ML_OPTIONS[:-2]),
            "keep": None if options.keep is None else tuple(options.keep),
        },
        output=options.folder,
        temporary=options.temporary,
        progress=progress_of(options),
    )
    return print_report(report, options)


def coreml_lint(options: argparse.Namespace) -> int:
    """`coreml lint`."""
    from paceline.tools.coreml import commands

    return print_report(commands.lint(options.artifact), options)


def coreml_golden(options: argparse.Namespace) -> int:
    """`coreml golden`."""
    from paceline.tools.coreml import commands

    chosen = named(options, "source", "tokens", "threshold", "rounding", "temporary")
    report = commands.golden(options.artifact, **chosen, progress=progress_of(options))
    return print_report(report, options)


def coreml_residency(options: argparse.Namespace) -> int:
    """`coreml residency`."""
    from paceline.tools.coreml import commands

    chosen = named(options, "units", "recorded", "record")
    report = commands.residency(options.artifact, **chosen, progress=progress_of(options))
    return print_report(report, options)


def train_prompts(options: argparse.Namespace) -> int:
    """`train prompts`."""
    from paceline.tools.train import commands

    chosen = named(options, "count", "temperature", "seed", "at_once", "threads")
    report = commands.prompts(options.target, options.out, **chosen, progress=progress_of(options))
    return print_report(report, options)


def train_answers(options: argparse.Namespace) -> int:
    """`train answers`."""
    from paceline.tools.train import commands

    chosen = named(options, "max_tokens", "seed", "at_once", "threads")
    chosen["temperatures"] = options.temperature or [0.0]
    report = commands.answers(
        options.target, options.prompts, options.out, **chosen, progress=progress_of(options)
    )
    return print_report(report, options)


def train_table(options: argparse.Namespace) -> int:
    """`train table`."""
    from paceline.tools.train import commands

    report = commands.table(
        options.target,
        _data(options),
        options.out,
        megabytes=options.megabytes,
        progress=progress_of(options),
    )
    return print_report(report, options)


def train_dflash(options: argparse.Namespace) -> int:
    """`train dflash`."""
    from paceline.tools.train import commands

    commands.check_training(**named(options, "block", "rate", "gamma", "device"))
    paces = "steps", "texts", "anchors", "gamma", "rate", "seed", "evaluate_every"
    report = commands.dflash(
        options.target,
        _data(options),
        options.out,
        **named(options, "layers", "block", "taps", "vocab", "device"),
        schedule=named(options, *paces),
        progress=progress_of(options),
    )
    return print_report(report, options)


def _data(options: argparse.Namespace) -> list[Path]:
    """The folders of answers to learn from; made first where only prompts were given."""
    from paceline.tools.train import commands

    folders = list(options.data or [])
    if options.prompts:
        made = options.out / "answers"
        commands.answers(options.target, options.prompts, made, progress=progress_of(options))
        folders.append(made)
    if not folders:
        raise InvalidRequest("nothing to learn from; give --data ANSWERS or --prompts FILE")
    return folders
