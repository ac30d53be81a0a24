"""The types that modules exchange: blocks, logits, proposals, and the protocols around them.

Depends on numpy alone. Terms: a *block* is `[last token, draft 1, ... draft T-1]`, run in one call
as T rows; row i's logits choose the token after row i.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
"""[rows, vocab] float32. A view of the engine's memory: valid until its next step."""

Taps = Mapping[str, npt.NDArray[np.float32]]
"""`tap_name(layer)` -> [T, d] float32, hidden states after it for every row of the block."""


FINAL_NORM = -1
"""In place of a tapped layer: the hidden states after the last norm, which the head reads."""


def tap_name(layer: int) -> str:
    """Name of the hidden states after a layer; 0 is the first layer, `FINAL_NORM` the last norm."""
    return f"tap.{layer}"


T = TypeVar("T")


class DeferredRows(Sequence[T]):
    """Tokens or probabilities that a device is still computing; their number is known.

    Reading one value waits for all. A slice from the start is pending too. An engine on the same
    device takes `array` without waiting, so that draft and verification are computed together.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[T]],
        length: int,
        array: Any = None,
        known: Sequence[T] = (),
    ) -> None:
        """Describe the values.

        Args:
            read: waits, and returns at least `length` values.
            length: number of values, without `known`.
            array: the same values on the device, [length or more]; None: the device has no use
                for them.
            known: values that precede the pending ones.
        """
        self._read, self._length = read, length
        self._values: list[T] | None = None
        self.array, self.known = array, known

    def after(self, first: T) -> "DeferredRows[T]":
        """The same values after one known value."""
        return DeferredRows(self._read, self._length, self.array, [first, *self.known])

    def __len__(self) -> int:
        return len(self.known) + self._length

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...

    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            pending = stop - len(self.known)
            if pending <= 0 < step:
                return self.known[start:stop:step]
            if (start, step) == (0, 1):
                return DeferredRows(self._read, pending, self.array, self.known)
        if self._values is None:
            self._values = [*self.known, *self._read()[: self._length]]
        return self._values[at]


class Block(NamedTuple):
    """Rows for one sequence in one engine call, at its KV slots [length, length + T)."""

    tokens: Sequence[int]
    """T token ids."""
    rows: int
    """Trailing rows that need logits: 0 inside a prompt, 1 at its end, T in decode."""
    best: bool = False
    """Whether the argmax of each row suffices: the engine may then return `Best`."""
    prefill: bool = False
    """Whether this is a chunk of a prompt. An engine may compute prefill and decode differently,
    but the result must not depend on where the prompt is cut into chunks."""


class Best(NamedTuple):
    """Argmax of rows of logits, in place of the logits."""

    tokens: npt.NDArray[np.int64]
    """[rows]: argmax; the first index of equals, as numpy's argmax."""
    scores: Logits
    """[rows]: its logit."""


class Proposal(NamedTuple):
    """A drafter's draft, and its evidence for it."""

    tokens: Sequence[int]
    """Draft token ids in text order; empty when the drafter abstains."""
    source: str
    """The drafter's name."""
    match: int = 0
    """Evidence for the first token on the drafter's own scale; for matchers, the context tokens
    that matched. Acceptance is estimated per (source, match)."""
    probabilities: Sequence[float] = ()
    """The drafter's own estimate, for each token, that it is accepted after those before it were.
    Empty: `match` is the evidence."""
    hidden: float = 0.0
    """Seconds of its drafting that passed while the target verified the block before."""

    def cut(self, length: int) -> "Proposal":
        """Its first `length` tokens."""
        return self._replace(tokens=self.tokens[:length], probabilities=self.probabilities[:length])


NO_PROPOSAL = Proposal((), "none")
"""The proposal of a drafter that abstains."""


@dataclass(frozen=True, slots=True)
class ComputedBlock:
    """A block that the target has computed, for drafters that learn from it."""

    tokens: Sequence[int]
    """The T token ids that were run."""
    start: int
    """Position of tokens[0] in the sequence."""
    accepted_rows: int
    """Leading tokens that are now part of the sequence."""
    taps: Taps = field(default_factory=dict)


class Drafter(Protocol):
    """Proposes drafts for one request. Only `propose` has to be implemented."""

    name: str

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """Propose at most `limit` tokens (>= 1) that follow `context`.

        `context` is the prompt and everything generated so far. It only grows between calls, so
        that a drafter may index just the new tokens. It must not be changed.
        """
        ...

    def before_verify(self, context: Sequence[int], draft: Sequence[int]) -> None:
        """Called before the target runs a decode block: `context` followed by `draft`.

        Must not block: work that overlaps with verification belongs in another thread.
        """
        return

    def observe(self, computed: ComputedBlock) -> None:
        """Learn from a finished step. Called after every step, prefill included."""
        return

    def cost(self, limit: int) -> float:
        """Seconds that a proposal of up to `limit` tokens takes; 0.0 if negligible."""
        return 0.0

    def close(self) -> None:
        return


class DecodeOutcome(NamedTuple):
    """Result of a decode step, for a policy."""

    proposal: Proposal
    """The proposal that was verified."""
    accepted: int
    """Draft tokens accepted."""
    seconds: float
    """Measured time of the step, draft and verify; 0.0: not measured."""
    tokens: Sequence[int] = ()
    """The accepted tokens, and the target's own token after them."""


class Policy(Protocol):
    """Decides which drafters propose, and how many draft tokens are verified, for one request."""

    name: str

    def draft(self, drafters: Sequence[Drafter], context: Sequence[int], limit: int) -> Proposal:
        """The proposal to verify, of at most `limit` tokens (>= 1).

        `NO_PROPOSAL` decodes plainly.
        """
        ...

    def observe(self, outcome: DecodeOutcome) -> None: ...


class Constraint(Protocol):
    """Restricts the tokens of one request's answer, e.g. to a grammar."""

    def masked(self, logits: Logits) -> Logits:
        """A copy of a row of logits, [vocab], with -inf for tokens that may not come next.

        At least one token is allowed.
        """
        ...

    def push(self, token: int) -> None:
        """Append `token`, which was allowed, to the answer."""
        ...

    def forced(self, limit: int) -> Sequence[int]:
        """At most `limit` next tokens that have no alternative."""
        ...

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Length of the longest prefix of `tokens` that is allowed next."""
        ...


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, the context limit, or the end of the KV cache."""
    REPETITION = "repetition"
    """The answer repeated itself, and the request stops on repetition."""
    CANCELLED = "cancelled"


FORCED = "forced"
"""Source of a proposal whose tokens are the only ones that a constraint allows: not a draft."""


class TokenLogprob(NamedTuple):
    """Log probability of a token, and of the most likely tokens at its position."""

    token: int
    logprob: float
    """Natural logarithm of its probability."""
    top: Sequence[tuple[int, float]] = ()
    """(token, logprob) of the most likely tokens, best first; of equals the lower id first."""
    text: str = ""
    """The token's text; `bytes:\\xf0\\x9f` if its bytes are not whole characters."""
    top_texts: Sequence[str] = ()


class Piece(NamedTuple):
    """A token of an answer, and the text that it completes.

    That is whole characters: none, or those of several tokens.
    """

    token: int = -1
    """-1: none; the text was held back until the end."""
    text: str = ""
    """Text of the answer, stop strings included."""
    final: str = ""
    """Final text of the answer: without a possible start of a stop string, with text held back
    earlier that turned out to start none, and with a sign before marks (`decoding/text.py`)."""
    reasoning: str = ""
    source: str | None = None
    """The drafter whose draft had the token, or `FORCED`; None: it was not drafted."""
    logprobs: TokenLogprob | None = None
    """None: the request records none."""

    def extended(self, text: str, final: str = "", reasoning: str = "") -> "Piece":
        """Return the same token with more text."""
        text, final, reasoning = self.text + text, self.final + final, self.reasoning + reasoning
        return self._replace(text=text, final=final, reasoning=reasoning)


NO_TOKEN = Piece()


class Step(NamedTuple):
    """Result of one engine call for a request."""

    accepted_rows: int
    """Rows of the block that are now part of the sequence: its length grows by this."""
    pieces: Sequence[Piece] = ()
    """New tokens of the answer; empty inside the prompt."""
    proposal: Proposal = NO_PROPOSAL
    """The tokens after the last token in the block; its source may be `FORCED`."""
    reasoning_tokens: int = 0
    """Tokens of reasoning in the whole answer so far."""

    @property
    def tokens(self) -> list[int]:
        return [piece.token for piece in self.pieces]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Logprobs of the new tokens, if the request records them."""
        return [piece.logprobs for piece in self.pieces if piece.logprobs is not None]

    @property
    def text(self) -> str:
        """New final text of the answer."""
        return "".join(piece.final for piece in self.pieces)

    @property
    def reasoning(self) -> str:
        """New text of the model's reasoning, if its marks are known."""
        return "".join(piece.reasoning for piece in self.pieces)

    @property
    def drafted(self) -> int:
        return 0 if self.proposal.source == FORCED else len(self.proposal.tokens)

    @property
    def accepted(self) -> int:
        """Draft tokens that the target picked too."""
        return sum(piece.source not in (None, FORCED) for piece in self.pieces)

    @property
    def forced(self) -> int:
        return sum(piece.source == FORCED for piece in self.pieces)


@dataclass(slots=True)
class Counters:
    """Steps and tokens of decode; prefill is not counted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    fallbacks: int = 0
    """Drafts that were not accepted whole: the target fell back to a token of its own."""
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    drafted_at: list[int] = field(default_factory=list)
    """Drafted tokens by position in the draft, from 0."""
    accepted_at: list[int] = field(default_factory=list)
    """Accepted tokens by position in the draft."""
    hidden_seconds: float = 0.0
    """Seconds of drafting while the target verified, of the drafts that were used."""

    def count(self, step: Step) -> None:
        self.steps += 1
        self.forced += step.forced
        self.hidden_seconds += step.proposal.hidden
        if drafted := step.drafted:
            accepted, source = step.accepted, step.proposal.source
            _count_positions(self.drafted_at, drafted)
            _count_positions(self.accepted_at, accepted)
            self.drafted += drafted
            self.accepted += accepted
            self.fallbacks += accepted < drafted
            self.drafted_by[source] = self.drafted_by.get(source, 0) + drafted
            self.accepted_by[source] = self.accepted_by.get(source, 0) + accepted


def _count_positions(counts: list[int], length: int) -> None:
    counts += [0] * (length - len(counts))
    for position in range(length):
        counts[position] += 1


Tokens = Sequence[int] | npt.NDArray[np.integer]


def common_prefix_length(one: Tokens, other: Tokens) -> int:
    """Tokens before the first position at which the two differ. Fast for two arrays."""
    length = min(len(one), len(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        differing = np.flatnonzero(one[:length] != other[:length])
        return int(differing[0]) if len(differing) else length
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), length)
