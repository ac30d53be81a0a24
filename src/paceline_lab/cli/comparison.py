"""Options of `bench sweep` and `bench simulate`: what is compared."""

from dataclasses import dataclass
from typing import Annotated

from paceline.cli import declare, numbers
from paceline.cli.bench import Drafters
from paceline_lab.arguments import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonArguments(Comparison):
    """Drafters and policies on the command line."""

    drafters: Drafters
    policies: Annotated[
        list[str],
        declare.several(
            "--policy",
            help="auto, fixed, adaptive or kelly, or with rows: fixed:8; may be repeated",
        ),
    ]
    blocks: Annotated[
        list[int],
        declare.several(
            "--block", parser=numbers.BLOCK, help="rows, for policies without them; may be repeated"
        ),
    ]
