"""A loaded model and the one loop that drives it: blocks to the engine, rows to the generation.

Puts the rooms together for one stream at a time, and is where the clock is: `decoding` has none.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline import drafters
from paceline.decoding.auto import Acceptance, Auto
from paceline.decoding.generation import Generation, Step, Stopping
from paceline.decoding.policy import Adaptive, Fixed, Kelly
from paceline.decoding.sampling import Sampling
from paceline.decoding.types import Drafter, FinishReason, Policy
from paceline.drafters.probe import Probe
from paceline.engines.base import Engine
from paceline.engines.base import Sequence as Slots
from paceline.engines.measure import MAX_ROWS, Measurement, measured
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles, cache_dir, resolve

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A user's message, a list of chat messages, or token ids."""

DEFAULT_MODEL = "smollm2-135m"

_RULE_BLOCK = 8
"""Block of the policies that do not weigh costs, when the caller does not say."""


@dataclass(frozen=True, slots=True)
class Request:
    """How to answer. Every field of `Sampling` and `Stopping` that users set, and speculation."""

    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    drafter: str = "auto"
    policy: str = "auto"
    max_block: int | None = None
    probe: str | None = None
    raw: bool = False


@dataclass(slots=True)
class Stats:
    """What a generation did and where its time went. Times are seconds."""

    steps: int = 0
    """Engine calls after the prompt."""
    drafted: int = 0
    accepted: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were there already."""
    load_seconds: float = 0.0
    """Loading the model, once per process."""
    first_token_seconds: float = 0.0
    """From the request to the first token."""
    prefill_seconds: float = 0.0
    """The prompt's engine calls and what surrounds them."""
    decode_seconds: float = 0.0
    """All of the answer after its first token: draft, verify, sample and the rest."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    """In the engine's calls, head included: the graph computes it."""
    sample_seconds: float = 0.0
    """Picking tokens, accepting, text."""
    decoded: int = 0
    """Tokens after the first."""
    probe: dict[str, int] | None = None
    """With a probe: steps, drafted and accepted that it would have had."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over all of them; 0.0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens per engine call (tau); 0.0 without steps."""
        return self.decoded / self.steps if self.steps else 0.0

    @property
    def host_seconds(self) -> float:
        """Decode time outside the engine's calls."""
        return self.decode_seconds - self.verify_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first, over decode time."""
        return self.decoded / self.decode_seconds if self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = [
            *("steps", "drafted", "accepted", "acceptance_rate", "tokens_per_step"),
            *("drafted_by", "accepted_by", "cached_tokens", "load_seconds", "first_token_seconds"),
            *("prefill_seconds", "decode_seconds", "draft_seconds", "verify_seconds"),
            *("sample_seconds", "host_seconds", "decode_tokens_per_second"),
        ]
        return {name: getattr(self, name) for name in names} | (
            {"probe": self.probe} if self.probe is not None else {}
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer."""

    text: str
    token_ids: list[int]
    """The answer's tokens, an ending stop token included."""
    finish_reason: FinishReason
    stats: Stats
    prompt_tokens: int
    engine: str
    drafter: str
    policy: str
    exact: bool
    """Whether the tokens equal plain decoding's: rows were measured not to depend on the block."""
    seed: int

    @property
    def completion_tokens(self) -> int:
        """Tokens in the answer."""
        return len(self.token_ids)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": str(self.finish_reason),
            "engine": self.engine,
            "drafter": self.drafter,
            "policy": self.policy,
            "exact": self.exact,
            "seed": self.seed,
            "stats": self.stats.as_dict(),
        }


class Stream:
    """An answer as it comes: iterate for `Piece`s of text; `result` is there at the end.

    Leaving the loop early, or `close()`, gives the sequence's slots back.
    """

    def __init__(self, pieces: Iterator[Step], result: "list[Result]") -> None:
        self._pieces = pieces
        self._result = result

    def __iter__(self) -> Iterator[Step]:
        return self._pieces

    def __next__(self) -> Step:
        return next(self._pieces)
