"""Matches an answer against a grammar token by token, with llguidance in a process of its own.

Invariant: the allowed tokens depend on the answer's tokens alone, not on drafts or earlier calls.
So forced tokens are drafts that are always accepted.
"""

import re
import weakref
from base64 import b64decode
from collections.abc import Sequence
from itertools import takewhile
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.constraints.matcher_process import Caller, GrammarError, MatcherProcesses
from paceline.decoding.types import Logits
from paceline.errors import InvalidRequest, MissingExtra

_SECONDS, _TOKEN_SECONDS = 1.0, 0.02
"""CPU seconds that an answer's masks may take: at once, and in addition for each token. Common ones
take 0.1 ms, of 8,000 alternatives 10 ms (2026-11-25, EPYC). All running answers wait for them."""

_TRIALS = 3
"""Attempts at a request when its matcher is lost and opened again."""


class GrammarConstraint:
    """A `Constraint`: a grammar and the position of an answer in it."""

    def __init__(
        self,
        what: str,
        processes: MatcherProcesses,
        grammar: str,
        vocab_size: int,
        caller: Caller,
    ) -> None:
        """Compile a grammar of llguidance for logits of `vocab_size` columns.

        Raises InvalidRequest, which names `what`, when no first token is allowed, or the grammar is
        too complex, and Busy when the `caller` has waited too long for other grammars.
        """
        self._what = what
        self._vocab_size = vocab_size
        self._processes = processes
        self._grammar = grammar
        self._tokens: list[int] = []  # of the answer, as far as the matcher has them
        self._unsent: list[int] = []  # later ones, of forced text
        self._seconds = 0.0
        self._number: int | None = None  # of the matcher, which is opened when it is needed
        self._known: dict[str, Any] = {}
        try:
            processes.compile(grammar, caller)
        except GrammarError as error:
            raise InvalidRequest(f"{what} cannot be followed: {reason(str(error))}") from None

    def masked(self, logits: Logits) -> Logits:
        """Return a copy of a row of logits, [vocab], with -inf for tokens that are not allowed.

        Raises InvalidRequest when the grammar becomes too complex.
        """
        masked = np.full_like(logits, -np.inf)
        if run := self.forced(1):
            masked[run[0]] = logits[run[0]]
        else:
            np.copyto(masked, logits, where=self._allowed()[: logits.size])
        return masked

    def push(self, token: int) -> None:
        """Append a token of the answer; after the grammar's end, nothing changes."""
        if self._state["stopped"]:
            return
        run = self.forced(1)
        self._unsent.append(token)
        # Forced tokens are computed where they begin: later calls could tokenize them otherwise.
        if run != [token] or not self.forced(1):
            self._known = self._ask("push")

    def forced(self, limit: int) -> Sequence[int]:
        """At most `limit` tokens of the forced text, as the tokenizer encodes it."""
        at = len(self._unsent)
        run: list[int] = self._state["run"][at : at + limit]
        return run

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Length of the longest prefix of `tokens` that is allowed next."""
        if self._state["stopped"]:
            return 0
        draft = list(takewhile(range(self._vocab_size).__contains__, map(int, tokens)))
        return int(self._ask("validate", draft=draft)["length"])

    @property
    def _state(self) -> dict[str, Any]:
        if self._number is None:
            try:
                self._known = self._counted(self._open())
            except GrammarError as error:
                raise self._stuck(str(error)) from None
        return self._known

    def _open(self) -> dict[str, Any]:
        self._number, state = self._processes.open(self._grammar, self._tokens)
        weakref.finalize(self, self._processes.close, self._number).atexit = False
        return state

    def _ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Send the tokens that the matcher does not have yet; returns its answer."""
        tokens = list(map(int, self._unsent))
        try:
            for _ in range(_TRIALS):
                request = {"do": do, "id": self._number, "tokens": tokens, **more}
                answer = self._processes.ask(self._grammar, request)
                if answer is not None:
                    self._tokens += tokens
                    self._unsent = []
                    return self._counted(answer)
                self._open()  # the process has ended, perhaps because of another grammar
        except GrammarError as error:
            raise self._stuck(str(error)) from None
        raise self._stuck("it takes too much memory; simplify it")

    def _counted(self, answer: dict[str, Any]) -> dict[str, Any]:
        self._seconds += answer["seconds"]
        if self._seconds > _SECONDS + _TOKEN_SECONDS * len(self._tokens):
            count = len(self._tokens)
            raise GrammarError(f"{count} tokens took {self._seconds:.1f} s; simplify it")
        return answer

    def _allowed(self) -> npt.NDArray[np.bool_]:
        """Return allowed tokens, [vocab] bool; at the grammar's end, the stop tokens."""
        if self._state["stuck"]:
            raise self._stuck(self._state["stuck"])
        bits = np.frombuffer(b64decode(self._state["mask"]), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise self._stuck("NoExtension")
        return allowed

    def _stuck(self, error: str) -> InvalidRequest:
        return InvalidRequest(f"{self._what} cannot be followed further: {reason(error)}")


def library() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtra(
            "constrained answers need llguidance; install it with: pip install llguidance"
        ) from error
    return llguidance


def reason(message: str) -> str:
    """Llguidance's message as one short line."""
    if message.startswith("NoExtension"):
        return "no token is allowed next"
    where = re.match(r"(?:at )?(\d+)\(\d+\): ", message)
    errors = re.findall(r"^error: (.+)$", message, re.MULTILINE)  # of a regular expression
    line = errors[-1] if errors else message[where.end() if where else 0 :].partition("\n")[0]
    line = line.rpartition("(in regex): ")[2]
    if where and where[1] != "1":
        line = f"line {where[1]}: {line}"
    return line if len(line) <= 200 else f"{line[:200]}..."
