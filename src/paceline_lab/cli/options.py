"""Options that several of the lab's commands share: measurements and comparisons."""

import os
from dataclasses import dataclass
from typing import Annotated

from paceline.cli import declare
from paceline.cli.console import check_writable, progress_of
from paceline.cli.options import MaxTokens, Output, ResultFile, Suite
from paceline.options import RANGES
from paceline.storage.progress import Progress
from paceline.system.machine import load_average

Drafters = Annotated[list[str], declare.drafters(help="a drafter; may be repeated; default: auto")]
Limit = Annotated[
    int | None,
    declare.count(
        metavar="N",
        help="use only N prompts: the same number of each kind, spread evenly over the file",
    ),
]
TOKENS = 128
"""Maximum tokens of an answer, by default."""

Rounds = Annotated[int, declare.count(help="repetitions of each measurement")]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementArguments:
    rounds: Rounds = 3
    limit: Limit = None
    suite: Suite = None
    max_tokens: MaxTokens = TOKENS
    output: ResultFile = None

    def __post_init__(self) -> None:
        check_writable(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonArguments:
    drafters: Drafters
    policies: Annotated[
        list[str],
        declare.several(
            "--policy",
            help="auto, fixed, adaptive or kelly, or with a block size: fixed:8; may be repeated",
        ),
    ]
    blocks: Annotated[
        list[int],
        declare.several(
            "--block",
            parser=RANGES["max_block"],
            help="block size for policies without one; may be repeated",
        ),
    ]


def measuring(output: Output) -> Progress:
    """Return the progress of a measurement, after a line if the machine is busy."""
    progress, load, cpus = progress_of(output), load_average(), os.cpu_count() or 1
    if 4 * load > cpus:
        progress.note(f"the machine is busy: a load of {load:.1f} on {cpus} CPUs; times will vary")
    return progress
