"""Matches an answer against a grammar token by token, with llguidance.

Invariant: the allowed tokens depend on the answer's tokens alone, not on drafts or earlier calls.
So forced tokens are drafts that are always accepted.
"""

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, takewhile
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Logits
from paceline.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Made = TypeVar("Made")

_STACK = 256 * 2**20
"""Bytes of stack for compiling. llguidance recurses along chains of rules and references: grammars
of 64 KiB needed up to 64 MiB, and a stack overflow ends the process. Unused stack costs nothing."""

_stack_size = threading.Lock()


class GrammarConstraint:
    """A `Constraint`: a grammar and the position of an answer in it."""

    def __init__(self, what: str, tokens: "LLTokenizer", grammar: str, vocab_size: int) -> None:
        """Compile a grammar of llguidance for logits of `vocab_size` columns.

        Raises InvalidRequest, which names `what`, when no first token is allowed.
        """
        self._what = what
        self._vocab_size = vocab_size
        limits = library().LLParserLimits(verbose_errors=False)  # else errors show the grammar

        def compiled() -> "LLMatcher":
            matcher: LLMatcher = library().LLMatcher(tokens, grammar, log_level=0, limits=limits)
            matcher.compute_bitmask()  # some faults appear only here
            return matcher

        self._matcher = _with_stack(compiled)
        if self._matcher.is_error():
            raise InvalidRequest(f"{what} cannot be followed: {reason(self._matcher.get_error())}")
        # Forced tokens, computed once where they begin: later calls could tokenize them otherwise.
        self._run: Sequence[int] | None = None
        self._at = 0

    def masked(self, logits: Logits) -> Logits:
        """A copy of a row of logits, [vocab], with -inf for tokens that are not allowed next.

        Raises InvalidRequest when the grammar becomes too complex.
        """
        found = np.full_like(logits, -np.inf)
        run = self._ahead()
        if self._at < len(run):
            found[run[self._at]] = logits[run[self._at]]
        else:
            np.copyto(found, logits, where=self._allowed()[: logits.size])
        return found

    def push(self, token: int) -> None:
        """Append a token of the answer; after the grammar's end, nothing changes."""
        if self._matcher.is_stopped():
            return
        forced = len(self._ahead())
        self._at += 1
        if self._at >= forced:
            self._run, self._at = None, 0
        if not self._matcher.consume_token(token):
            raise self._stuck()

    def forced(self, limit: int) -> Sequence[int]:
        """At most `limit` tokens of the forced text, as the tokenizer encodes it."""
        return self._ahead()[self._at : self._at + limit]

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """Length of the longest prefix of `tokens` that is allowed next."""
        if self._matcher.is_stopped():
            return 0
        known = takewhile(range(self._vocab_size).__contains__, tokens)
        return int(self._matcher.validate_tokens(list(known)))

    def _ahead(self) -> Sequence[int]:
        if self._run is None:
            self._run = () if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        return self._run

    def _allowed(self) -> npt.NDArray[np.bool_]:
        """Return allowed tokens, [vocab] bool; at the grammar's end, the stop tokens."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():  # the bits allow the stop tokens, wrongly
            raise self._stuck()
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise self._stuck()
        return allowed

    def _stuck(self) -> InvalidRequest:
        why = reason(self._matcher.get_error() or "NoExtension")
        return InvalidRequest(f"{self._what} cannot be followed any further: {why}")


class ExactTokenizer:
    """A tokenizer for llguidance whose tokens decode to exactly the forced text.

    llguidance's own reader of tokenizer.json encodes "<think>" in a text as the token of that name,
    which is not text, and may normalise. Such a token would be forced, and then rejected.
    """

    def __init__(self, read: "LLTokenizer") -> None:
        self._read = read
        ids = range(read.vocab_size)
        self.eos_token_id = read.eos_token
        self.bos_token_id = None
        self.tokens = [read.decode_bytes([token]) for token in ids]
        self.special_token_ids = [token for token in ids if read.is_special_token(token)]
        names = filter(None, (read.decode_str([token]) for token in self.special_token_ids))
        # Matches where a name begins: cutting after its first character leaves no name.
        self._names = re.compile(f"(?={'|'.join(map(re.escape, names)) or '(?!)'})")

    def __call__(self, text: bytes) -> list[int]:
        """Tokens whose bytes together are `text`, in UTF-8."""
        string = text.decode("utf-8")
        cuts = [0, *(found.start() + 1 for found in self._names.finditer(string)), len(string)]
        return [token for start, end in pairwise(cuts) for token in self._part(string[start:end])]

    def _part(self, text: str) -> list[int]:
        ids = self._read.tokenize_str(text)
        exact = self._read.decode_bytes(ids) == text.encode("utf-8")
        return ids if exact else self._read.greedy_tokenize(text)


def library() -> ModuleType:
    """Import llguidance. Raises MissingExtra."""
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


def _with_stack(work: Callable[[], Made]) -> Made:
    """Run `work` in a thread with a large stack."""
    with ThreadPoolExecutor(1) as pool:
        with _stack_size:
            before = threading.stack_size(_STACK)
            try:
                done = pool.submit(work)  # starts the thread
            finally:
                threading.stack_size(before)
        return done.result()
