"""The words the rooms speak with: what goes to an engine, what comes back, what a drafter offers.

Knows nothing of engines, files or clocks; numpy is all it imports. Terms: a *block* is
`[last token, draft 1, ... draft T-1]`, run in one call as T rows; row i's logits choose the token
after row i.
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


def tap_name(layer: int) -> str:
    """What the hidden states after a layer (0 is the first) are called."""
    return f"tap.{layer}"


T = TypeVar("T")


class Pending(Sequence[T]):
    """Tokens, or their probabilities, that are still being computed: how many there are is known.

    Whoever looks at one waits for all. Those at its beginning are as pending as the whole. An
    engine on the same device takes `array` without looking, and computes draft and verification
    together.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[T]],
        length: int,
        array: Any = None,
        before: Sequence[T] = (),
    ) -> None:
        """Say what there will be.

        Args:
            read: waits, and returns `length` values or more.
            length: how many are meant.
            array: the same on the device, [length or more]; None: nobody there can use it.
            before: what is known already and stands in front of them.
        """
        self._read, self._length = read, length
        self._values: list[T] | None = None
        self.array, self.before = array, before

    def after(self, first: T) -> "Pending[T]":
        """The same behind something that is known."""
        return Pending(self._read, self._length, self.array, [first, *self.before])

    def __len__(self) -> int:
        return len(self.before) + self._length

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...

    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            pending = stop - len(self.before)
            if pending <= 0 < step:
                return self.before[start:stop:step]
            if (start, step) == (0, 1):
                return Pending(self._read, pending, self.array, self.before)
        if self._values is None:
            self._values = [*self.before, *self._read()[: self._length]]
        return self._values[at]


class Block(NamedTuple):
    """Rows for one sequence in one engine call, at its slots [length, length + T)."""

    tokens: Sequence[int]
    """T token ids."""
    rows: int
    """How many trailing rows need logits: 0 inside a prompt, 1 at its end, T when drafting."""
    best: bool = False
    """Whether a row's most likely token is all that is asked for: an engine may return `Best`."""
    prefill: bool = False
    """Whether this is a part of a prompt. An engine may compute it in another way than an answer,
    but not in a way that depends on where prompts are cut."""


class Best(NamedTuple):
    """What stands for rows of logits of which only the highest is asked for."""

    tokens: npt.NDArray[np.int64]
    """[rows]: the most likely token; of equals the first, as numpy's argmax has it."""
    scores: Logits
    """[rows]: its logit."""


class Proposal(NamedTuple):
    """What a drafter guesses will come next."""

    tokens: Sequence[int]
    """Draft token ids, best guess first in time; empty when it has nothing to say."""
    source: str
    """The drafter's name."""
    match: int = 0
    """How much evidence stands behind the first token, in the drafter's own measure (for matchers:
    how many tokens of context matched). Acceptance is estimated per (source, match)."""
    probabilities: Sequence[float] = ()
    """For each token the drafter's own estimate that it stands, given that those before it did;
    empty where a drafter has none and `match` speaks for it."""

    def cut(self, length: int) -> "Proposal":
        """Its first `length` tokens."""
        return self._replace(tokens=self.tokens[:length], probabilities=self.probabilities[:length])


NO_PROPOSAL = Proposal((), "none")
"""The proposal of a drafter that abstains."""


@dataclass(frozen=True, slots=True)
class ComputedBlock:
    """One step's evidence beyond the tokens themselves, for drafters that learn from it."""

    tokens: Sequence[int]
    """The T token ids that were run."""
    start: int
    """The position of tokens[0] in the sequence."""
    kept: int
    """How many of them are now part of the sequence."""
    logits: Logits
    """[rows, vocab] for the block's trailing rows. Empty inside a prompt, and where no drafter
    reads logits."""
    taps: Taps = field(default_factory=dict)


class Drafter(Protocol):
    """Who guesses. One instance serves one request. A class of its own need only say `propose`."""

    name: str
    reads_logits: bool = False
    """Whether `observe` looks at them; if nobody does, a row's best token may be all there is."""

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """Guess at most `limit` tokens (>= 1) that follow `context`.

        `context` is the prompt and everything generated so far. It only ever grows between calls,
        so a drafter may index just what is new. It must not be changed.
        """
        ...

    def before_verify(self, context: Sequence[int], draft: Sequence[int]) -> None:
        """Note that a block is on its way to the target: `context` and, behind it, `draft`.

        Called for every block of the answer. What may be done meanwhile is done in another thread.
        """
        return

    def observe(self, computed: ComputedBlock) -> None:
        """Learn from a finished step. Called after every step, prompt chunks included."""
        return

    def cost(self, limit: int) -> float:
        """Seconds that a proposal of up to `limit` tokens takes; 0.0 for next to nothing."""
        return 0.0

    def close(self) -> None:
        """The request has ended: give back what is held for it. May be called again."""
        return


class DecodeOutcome(NamedTuple):
    """How a decode step went, as a policy sees it."""

    proposal: Proposal
    """What was computed."""
    accepted: int
    """How many draft tokens stood."""
    seconds: float
    """What the step took, draft and verify, as the caller measured it; 0.0 where nobody did."""
    tokens: Sequence[int] = ()
    """What came: the tokens that stood, and the target's own pick behind them."""


class Policy(Protocol):
    """Who is asked, and how many draft tokens to try. One instance serves one request."""

    name: str

    def draft(self, drafters: Sequence[Drafter], context: Sequence[int], room: int) -> Proposal:
        """Ask those drafters that are worth asking; the proposal to verify.

        It is cut to what is worth verifying, and to `room` tokens (>= 1); `NO_PROPOSAL` to decode
        plainly.
        """
        ...

    def observe(self, outcome: DecodeOutcome) -> None:
        """Learn from a finished decode step."""
        ...


class Constraint(Protocol):
    """What an answer has to look like: a grammar. One instance serves one request."""

    def masked(self, logits: Logits) -> Logits:
        """A row of logits, [vocab], in which no token that may not come next can be picked.

        At least one token can. The row itself is not changed.
        """
        ...

    def push(self, token: int) -> None:
        """Note that `token`, which was allowed, is now part of the answer."""
        ...

    def forced(self, limit: int) -> Sequence[int]:
        """The tokens that must come next, at most `limit`, as far as there is no choice."""
        ...

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, may come: more would be guessed in vain."""
        ...


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, the context limit, or the end of the key/value cache."""
    REPETITION = "repetition"
    """The answer repeated itself, and the request said to stop there."""
    CANCELLED = "cancelled"
    """The caller stopped it."""
