"""A grammar as llguidance follows it, token by token.

Knows llguidance and its traps. Knows nothing of what a grammar is for. The rule: what may come next
depends on the tokens of the answer and on nothing else, not on what was drafted or asked before; so
what is forced is only a guess that always stands.
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
"""Bytes of stack to compile on. llguidance recurses along chains of rules and references: grammars
of 64 KiB were seen to need up to 64 MiB, and a stack that ends takes the process with it. What is
not reached of it costs nothing."""

_stack_size = threading.Lock()


class Matched:
    """A `Constraint`: one grammar and how far an answer is in it."""

    def __init__(self, what: str, tokens: "LLTokenizer", grammar: str, vocab_size: int) -> None:
        """Compile a grammar, as llguidance has it, for rows of `vocab_size` columns.

        Raises InvalidRequest, which names `what`, when there is no first token.
        """
        self._what = what
        self._vocab_size = vocab_size
        limits = library().LLParserLimits(verbose_errors=False)  # else errors show the grammar

        def compiled() -> "LLMatcher":
            matcher: LLMatcher = library().LLMatcher(tokens, grammar, log_level=0, limits=limits)
            matcher.compute_bitmask()  # some faults only show here
            return matcher

        self._matcher = _with_stack(compiled)
        if self._matcher.is_error():
            told = reason(self._matcher.get_error())
            raise InvalidRequest(f"{what} cannot be followed: {told}")
        # What must come, found once where it begins: token by token it could be cut otherwise.
        self._run: Sequence[int] | None = None
        self._at = 0

    def masked(self, logits: Logits) -> Logits:
        """A copy of a row, [vocab], with -inf for what may not come.

        Raises InvalidRequest when the grammar turns out to be too complex to go on.
        """
        found = np.full_like(logits, -np.inf)
        run = self._ahead()
        if self._at < len(run):
            found[run[self._at]] = logits[run[self._at]]
        else:
            np.copyto(found, logits, where=self._allowed()[: logits.size])
        return found

    def push(self, token: int) -> None:
        """Go on by a token of the answer. After the end nothing changes any more."""
        if self._matcher.is_stopped():
            return
        forced = len(self._ahead())
        self._at += 1
        if self._at >= forced:
            self._run, self._at = None, 0
        if not self._matcher.consume_token(token):
            raise self._stuck()

    def forced(self, limit: int) -> Sequence[int]:
        """What must come, at most `limit` tokens: those that the tokenizer would make of it."""
        return self._ahead()[self._at : self._at + limit]

    def allowed_length(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` may come, from the first on."""
        if self._matcher.is_stopped():
            return 0
        known = takewhile(range(self._vocab_size).__contains__, tokens)
        return int(self._matcher.validate_tokens(list(known)))

    def _ahead(self) -> Sequence[int]:
        if self._run is None:
            self._run = () if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        return self._run

    def _allowed(self) -> npt.NDArray[np.bool_]:
        """[vocab]: which tokens may come; at the end those that end an answer."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():  # the bits say that the answer may end, which it may not
            raise self._stuck()
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise self._stuck()
        return allowed

    def _stuck(self) -> InvalidRequest:
        told = reason(self._matcher.get_error() or "NoExtension")
        return InvalidRequest(f"{self._what} cannot be followed any further: {told}")


class Exact:
    """A tokenizer as llguidance takes one, for forced text: its tokens say that and nothing else.

    llguidance's own reading of a tokenizer.json takes a "<think>" in a text for the token of that
    name, which is not text, and may normalise. Such a token would be forced, and then refused.
    """

    def __init__(self, read: "LLTokenizer") -> None:
        self._read = read
        ids = range(read.vocab_size)
        self.eos_token_id = read.eos_token
        self.bos_token_id = None
        self.tokens = [read.decode_bytes([token]) for token in ids]
        self.special_token_ids = [token for token in ids if read.is_special_token(token)]
        names = filter(None, (read.decode_str([token]) for token in self.special_token_ids))
        # Where one begins; what is cut behind its first character is no name any more.
        self._names = re.compile(f"(?={'|'.join(map(re.escape, names)) or '(?!)'})")

    def __call__(self, text: bytes) -> list[int]:
        """Tokens whose bytes together are `text`, in UTF-8."""
        whole = text.decode("utf-8")
        cuts = [0, *(found.start() + 1 for found in self._names.finditer(whole)), len(whole)]
        return [token for start, end in pairwise(cuts) for token in self._part(whole[start:end])]

    def _part(self, text: str) -> list[int]:
        ids = self._read.tokenize_str(text)
        exact = self._read.decode_bytes(ids) == text.encode("utf-8")
        return ids if exact else self._read.greedy_tokenize(text)


def library() -> ModuleType:
    """The library itself. Raises MissingExtra."""
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtra(
            "answers of a given form need llguidance; install it with: "
            "pip install 'paceline[serve]'"
        ) from error
    return llguidance


def reason(message: str) -> str:
    """What llguidance has to say, in one short line."""
    if message.startswith("NoExtension"):
        return "nothing can come"
    where = re.match(r"(?:at )?(\d+)\(\d+\): ", message)
    told = re.findall(r"^error: (.+)$", message, re.MULTILINE)  # the last words on an expression
    line = told[-1] if told else message[where.end() if where else 0 :].partition("\n")[0]
    line = line.rpartition("(in regex): ")[2]
    if where and where[1] != "1":
        line = f"line {where[1]}: {line}"
    return line if len(line) <= 200 else f"{line[:200]}..."


def _with_stack(work: Callable[[], Made]) -> Made:
    """Do it in a thread with room for deep recursion."""
    with ThreadPoolExecutor(1) as pool:
        with _stack_size:
            before = threading.stack_size(_STACK)
            try:
                done = pool.submit(work)  # starts the thread
            finally:
                threading.stack_size(before)
        return done.result()
