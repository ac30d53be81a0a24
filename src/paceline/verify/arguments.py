"""What `verify` is asked for; the command line adds how each part is written.

Imports nothing that takes time: `paceline verify --help` reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `verify` compares: of a model here, or with suite and length alone of a server."""

    whole: bool = False
    """Every combination, not only enough to cover every pair of their parameters."""
    quick: bool = False
    """What fits into a minute, and an estimate of how long all of it takes."""
    drafters: Sequence[str] = ()
    """Empty: all that the model has."""
    suite: Path | None = None
    """None: paceline's own prompts."""
    max_tokens: int
    output: Path | None = None
    """Results of a model here are journaled beside it until it is written."""
