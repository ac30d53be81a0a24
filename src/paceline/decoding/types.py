"""The types that modules exchange: blocks, logits, proposals, and the protocols around them.

Depends on numpy alone. Terms: a *block* is `[last token, draft 1, ... draft T-1]`, run in one
forward pass as T rows; row i's logits choose the token after row i.
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
"""`tap_name(layer)` -> [T, d] float32: the layer's hidden states for every row of the block."""


FINAL_NORM = -1
"""Stands for a tapped layer: the hidden states after the last norm, which the head reads."""


def tap_name(layer: int) -> str:
    """Return the name of a layer's hidden states; 0 is the first, `FINAL_NORM` the last norm."""
    return f"tap.{layer}"


T = TypeVar("T")


class DeferredRows(Sequence[T]):
    """Tokens or probabilities that a device is still computing; their number is known.

    Reading one value waits for all. A slice from the start is also pending. An engine on the same
    device uses `array` without waiting, so that draft and verification are computed together.
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
            array: the same values on the device, [length or more]; None: the device cannot use
                them.
            known: values that precede the pending ones.
        """
        self._read, self._length = read, length
        self._values: list[T] | None = None
        self.array, self.known = array, known

    def after(self, first: T) -> "DeferredRows[T]":
        """Return the same values after one known value."""
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
    """Rows for one sequence in one forward pass, at its KV slots [length, length + T)."""

    tokens: Sequence[int]
    """T token ids."""
    rows: int
    """Trailing rows that need logits: 0 inside a prompt, 1 at its end, T in decode."""
    best: bool = False
    """True if the argmax of each row suffices: the engine may then return `Best`."""
    prefill: bool = False
    """True for a chunk of a prompt. An engine may compute prefill and decode differently, but the
    result must not depend on where the prompt is cut into chunks."""


class Best(NamedTuple):
    """Argmax of rows of logits, in place of the logits."""

    tokens: npt.NDArray[np.int64]
    """[rows]: argmax; the first index of equals, as in numpy."""
    scores: Logits
    """[rows]: logit of the argmax."""


class Proposal(NamedTuple):
    """A drafter's draft, and its evidence for the draft."""

    tokens: Sequence[int]
    """Draft token ids in text order; empty when the drafter abstains."""
    source: str
    """The drafter's name."""
    match: int = 0
    """Evidence for the first token on the drafter's own scale; for matchers, the number of context
    tokens that matched. Acceptance is estimated per (source, match)."""
    probabilities: Sequence[float] = ()
    """The drafter's own estimate, per token, of P(accepted | all tokens before it were accepted).
    Empty: `match` is the evidence."""
    hidden: float = 0.0
    """Seconds of drafting that passed while the target verified the previous block."""

    def cut(self, length: int) -> "Proposal":
        """Return the proposal with its first `length` tokens."""
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

        `context` is the prompt and all tokens generated so far. It only grows between calls, so a
        drafter may index only the new tokens. It must not be changed.
        """
        ...

    def before_verify(self, context: Sequence[int], draft: Sequence[int]) -> None:
        """Prepare for a decode block that the target is about to run: `context` and `draft`.

        Must not block: work that overlaps with verification belongs in another thread.
        """
        return

    def observe(self, computed: ComputedBlock) -> None:
        """Learn from a finished step. Called after every step, prefill included."""
        return

    def cost(self, limit: int) -> float:
        """Return the seconds that a proposal of up to `limit` tokens takes; 0.0 if negligible."""
        return 0.0

    def close(self) -> None:
        return


class DecodeOutcome(NamedTuple):
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
        """Return the proposal to verify, of at most `limit` tokens (>= 1).

        `NO_PROPOSAL` means plain decoding.
        """
        ...

    def observe(self, outcome: DecodeOutcome) -> None: ...


class Constraint(Protocol):
    """Restricts the tokens of one request's response, e.g. to a grammar."""

    def masked(self, logits: Logits) -> Logits:
        """Return a copy of a row of logits, [vocab], with -inf for tokens that may not come next.

        At least one token is allowed.
        """
        ...

    def push(self, token: int) -> None:
        """Append `token`, which was allowed, to the response."""
        ...

    def forced(self, limit: int) -> Sequence[int]:
        """Return at most `limit` next tokens that have no alternative."""
        ...

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest prefix of `tokens` that is allowed next."""
        ...


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, the context limit, or the end of the KV cache."""
    REPETITION = "repetition"
    """The response repeated itself, and the request stops on repetition."""
    CANCELLED = "cancelled"


FORCED = "forced"
"""Source of a proposal of forced tokens, the only ones that a constraint allows: not a draft."""


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
    """A token of a response, and the text that it completes.

    The text has only whole characters, possibly none, or those of several tokens.
    """

    token: int = -1
    """-1: no token; the text was held back until the end."""
    text: str = ""
    """Text of the response, including stop strings."""
    final: str = ""
    """Final text of the response: without a possible start of a stop string, with text held back
    earlier that did not become one, and with a sign before tags (`decoding/text.py`)."""
    reasoning: str = ""
    source: str | None = None
    """The drafter whose draft had the token, or `FORCED`; None if it was not drafted."""
    logprobs: TokenLogprob | None = None
    """None if the request does not record logprobs."""

    def extended(self, text: str, final: str = "", reasoning: str = "") -> "Piece":
        text, final, reasoning = self.text + text, self.final + final, self.reasoning + reasoning
        return self._replace(text=text, final=final, reasoning=reasoning)


NO_TOKEN = Piece()


class Step(NamedTuple):
    """Result of one forward pass for a request."""

    accepted_rows: int
    """Rows of the block that are now part of the sequence: its length grows by this."""
    pieces: Sequence[Piece] = ()
    """New tokens of the response; empty inside the prompt."""
    proposal: Proposal = NO_PROPOSAL
    """The tokens after the last token in the block; its source may be `FORCED`."""
    reasoning_tokens: int = 0
    """Tokens of reasoning in the whole response so far."""

    @property
    def tokens(self) -> list[int]:
        return [piece.token for piece in self.pieces]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Logprobs of the new tokens, if the request records them."""
        return [piece.logprobs for piece in self.pieces if piece.logprobs is not None]

    @property
    def text(self) -> str:
        """New final text of the response."""
        return "".join(piece.final for piece in self.pieces)

    @property
    def reasoning(self) -> str:
        """New text of the model's reasoning, if its tags are known."""
        return "".join(piece.reasoning for piece in self.pieces)

    @property
    def drafted(self) -> int:
        return 0 if self.proposal.source == FORCED else len(self.proposal.tokens)

    @property
    def accepted(self) -> int:
        """Draft tokens that the target also picked."""
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
    """Drafts that were not fully accepted: the target fell back to a token of its own."""
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    drafted_at: list[int] = field(default_factory=list)
    """Drafted tokens by position in the draft, from 0."""
    accepted_at: list[int] = field(default_factory=list)
    """Accepted tokens by position in the draft."""
    hidden_seconds: float = 0.0
    """Seconds of drafting while the target verified, for the drafts that were used."""

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
    """Return the number of leading tokens that are equal. Fast for two arrays."""
    length = min(len(one), len(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        differing = np.flatnonzero(one[:length] != other[:length])
        return int(differing[0]) if len(differing) else length
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), length)
