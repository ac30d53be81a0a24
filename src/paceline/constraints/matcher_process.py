"""Processes that compile grammars and match answers against them.

They run `matcher_worker.py`, within limits of time and memory. A grammar is first compiled in a
process for that alone, so that one which exceeds a limit there delays no answer of others.
Invariant: a process that ends takes no answer along: its matchers are opened again, with the tokens
so far, except the one that ended it. A grammar that exceeded a limit is not tried again.
"""

import itertools
import json
import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from paceline.errors import Busy, ModelError
from paceline.system.processes import (
    Interrupt,
    Interrupted,
    TimeLimit,
    WorkerCrash,
    WorkerProcess,
)

COMPILE_SECONDS = 1.0
"""CPU seconds of compiling. Schemas with 2,000 properties and 128 functions with 20 took 0.3 s
(2026-11-25, EPYC)."""

STEP_SECONDS = 0.5
"""CPU seconds of a step: taking a token, and computing those that may follow."""

_LOOK_SECONDS = 0.1
"""How often a caller that waits looks whether it has left."""

_NO_TIME = "timed out waiting to compile this grammar while others compile; try again later"

_VERDICTS = 1024
"""Number of grammars whose compilation result is cached."""

_HANDLER = Path(__file__).with_name("matcher_worker.py")

_ids = itertools.count()


class GrammarError(Exception):
    """llguidance's reason why a grammar or a token is rejected, or the limit that it exceeded."""


class Caller:
    """A request that waits for grammars, for a limited time.

    As a context it leaves at the end: a grammar that is compiled for it alone is interrupted.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.interrupt = Interrupt()
        self._deadline = monotonic() + seconds

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.interrupt.request()

    @contextmanager
    def turn(self, lock: threading.Lock, *, patient: bool) -> Iterator[None]:
        """Hold a lock. Raises Busy if the caller leaves, or (not `patient`) its time is up."""
        while not lock.acquire(timeout=_LOOK_SECONDS):
            is_late = monotonic() > self._deadline and not patient
            if is_late or self.interrupt.requested:
                raise Busy(_NO_TIME)
        try:
            yield
        finally:
            lock.release()


class MatcherProcesses:
    """The processes for one model's tokenizer, which start at the first grammar. Thread-safe."""

    def __init__(self, tokenizer: Path, *, vocab_size: int, stops: Sequence[int]) -> None:
        model = {"tokenizer": str(tokenizer), "vocab_size": vocab_size, "stops": list(stops)}
        argument = json.dumps(model)
        self._tokenizer = tokenizer
        self._compiling = WorkerProcess(_HANDLER, "compiles grammars", argument)
        self._matching = WorkerProcess(_HANDLER, "matches grammars", argument)
        self._verdicts: dict[bytes, str] = {}  # of a grammar's digest; "": it can be compiled
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # one grammar after the other
        self._closed = deque[int]()

    def special_tokens(self) -> list[int]:
        """Return the tokens that are not text. Raises ModelError for an unsupported tokenizer."""
        return list(self._ask(self._matching, {"do": "special"}, COMPILE_SECONDS)["special"])

    def compile(self, grammar: str, caller: Caller) -> None:
        """Compile a grammar, to be opened.

        Raises GrammarError if it cannot be, and Busy if others take too long or the caller leaves.
        """
        request = {"do": "compile", "grammar": grammar}
        if self._verdict(grammar) is None:
            is_first = not self._verdicts  # for which the process reads the vocabulary
            with caller.turn(self._turn, patient=is_first):
                if self._verdict(grammar) is None:  # not compiled since
                    verdict = self._compiled(request, caller.interrupt)
                    self._keep_verdict(grammar, verdict)
        self._match(grammar, request, COMPILE_SECONDS + STEP_SECONDS)

    def _compiled(self, request: Mapping[str, Any], interrupt: Interrupt) -> str:
        """Return why a grammar cannot be compiled, or "". Raises Busy if its caller leaves."""
        self._matching.start()  # ready when the grammar is compiled
        try:
            self._ask(self._compiling, request, COMPILE_SECONDS, interrupt)
        except Interrupted:
            raise Busy(_NO_TIME) from None
        except TimeLimit:
            return f"it takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
        except WorkerCrash:
            return "it takes too much memory to compile; simplify it"
        except GrammarError as error:
            return str(error)
        return ""

    def open(self, grammar: str, tokens: Sequence[int] = ()) -> tuple[int, dict[str, Any]]:
        """Open a matcher of a compiled grammar: its id, and its state after tokens, as by `ask`."""
        number = next(_ids)
        request = {"do": "open", "id": number, "grammar": grammar, "tokens": list(tokens)}
        return number, self._match(grammar, request, COMPILE_SECONDS + STEP_SECONDS)

    def ask(self, grammar: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the response of an open matcher; None: it has to be opened again.

        Raises GrammarError if a token is not allowed, or a limit is exceeded.
        """
        answer = self._match(grammar, request, STEP_SECONDS)
        return None if "unknown" in answer else answer

    def close(self, number: int) -> None:
        """Close a matcher, at the next request."""
        self._closed.append(number)

    def _match(self, grammar: str, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if verdict := self._verdict(grammar):  # another answer met the limit
            raise GrammarError(verdict)
        try:
            try:
                return self._ask(self._matching, request, seconds)
            except WorkerCrash:  # perhaps the memory of all matchers together was too much
                if "grammar" not in request:
                    return {"unknown": True}
                return self._ask(self._matching, request, seconds)
        except (TimeLimit, WorkerCrash) as error:
            limit = f"{seconds:g} s" if isinstance(error, TimeLimit) else "the memory allowed"
            verdict = f"a token takes more than {limit}; simplify it"
            self._keep_verdict(grammar, verdict)
            raise GrammarError(verdict) from None

    def _ask(
        self,
        process: WorkerProcess,
        request: Mapping[str, Any],
        seconds: float,
        interrupt: Interrupt | None = None,
    ) -> dict[str, Any]:
        closed = []
        while process is self._matching and self._closed:
            closed.append(self._closed.popleft())
        line = json.dumps({**request, "seconds": seconds, "closed": closed})
        answer = process.ask(line.encode(), seconds, interrupt)
        if "unsupported" in answer:
            raise ModelError(f"{self._tokenizer} is not supported by llguidance: {answer['error']}")
        if "error" in answer:
            raise GrammarError(answer["error"])
        return answer

    def _verdict(self, grammar: str) -> str | None:
        return self._verdicts.get(sha256(grammar.encode()).digest())

    def _keep_verdict(self, grammar: str, verdict: str) -> None:
        with self._lock:
            self._verdicts[sha256(grammar.encode()).digest()] = verdict
            while len(self._verdicts) > _VERDICTS:
                del self._verdicts[next(iter(self._verdicts))]
