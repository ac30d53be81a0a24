"""What the lab's commands are asked for; the command line adds how each part is written.

Imports nothing that takes time: `paceline bench --help` reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The prompts of a measurement, how often each is measured, and the file of the result."""

    rounds: int
    kinds: Sequence[str] = ()
    """Kinds of prompts; empty: all."""
    per_kind: int | None = None
    suite: Path | None = None
    """None: paceline's own prompts."""
    max_tokens: int
    output: Path | None = None
    """Rows are journaled beside it until it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Drafters and policies, each with each; see `contender_options`."""

    drafters: Sequence[str] = ()
    policies: Sequence[str] = ()
    blocks: Sequence[int] = ()
    """Rows, for policies that do not name theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """A server, and the requests that it gets."""

    url: str
    model: str | None = None
    """None: the server's first."""
    api_key: str | None = None
    clients: Sequence[int] = ()
    rates: Sequence[float] = ()
    """Requests per second. Without clients and rates: 1 and 8 clients."""
    requests: int
    """Of each number of clients, and of each rate."""
    kinds: Sequence[str] = ()
    extra: str = "{}"
    """Further fields of every request, as a JSON object."""
    suite: Path | None = None
    max_tokens: int
