"""Matches answers against grammars, with llguidance: the handler of `MatcherProcesses`.

A grammar comes with a request, and llguidance's own limits bound neither the time nor the memory of
one derivative of an intersection: 101 bytes took gigabytes. So it runs in `system/guarded.py`.

Its argument is JSON, "tokenizer" (path), "vocab_size" and "stops". A request has "closed", the ids
of matchers that are not needed any more:

    {"do": "special"}                         {"special": [token, ...]}
    {"do": "compile", "grammar"}              {}
    {"do": "open", "id", "grammar", "tokens"} the state after the tokens
    {"do": "push", "id", "tokens"}            the state after more tokens
    {"do": "validate", "id", "tokens", "draft"}  {"length": allowed tokens of the draft}

An answer is {"error": "..."} where llguidance rejects the tokenizer (then with "unsupported"), the
grammar or a token, and {"unknown": true} for an unknown id. It has "seconds" of CPU time. A state:

    {"stopped": bool, "run": [token, ...], "mask": base64 of a bit per token or null,
     "stuck": why no token is allowed next}

A run is text that is forced here, as the tokenizer encodes it; a state with a run has no mask.
Reading a vocabulary takes 0.6 s of 49,152 tokens, and 6 s of 262,144 (2026-11-25, EPYC).
"""

import json
import re
import time
from base64 import b64encode
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import llguidance

STACK = 256 * 2**20
"""Bytes of stack. llguidance recurses along chains of rules and references: grammars of 64 KiB
needed up to 64 MiB, and a stack overflow ends the process. Unused stack costs nothing."""

MEMORY = STACK + 3 * 2**29
"""Bytes of address space: of a vocabulary of 262,144 tokens, 0.7 GB remain for grammars."""

_COMPILED = 32
"""Grammars that are kept compiled: the requests of an agent have the same one again and again."""

_LEXER_STATES = 50_000
"""Of 1 to 2 kB each; llguidance's own limit is 250,000."""


class ExactTokenizer:
    """A tokenizer for llguidance whose tokens decode to exactly the forced text.

    llguidance's own reader of tokenizer.json encodes "<think>" in a text as the token of that name,
    which is not text, and may normalise. Such a token would be forced, and then rejected.
    """

    def __init__(self, read: llguidance.LLTokenizer) -> None:
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
        cuts = [0, *(name.start() + 1 for name in self._names.finditer(string)), len(string)]
        return [token for start, end in pairwise(cuts) for token in self._part(string[start:end])]

    def _part(self, text: str) -> list[int]:
        ids = self._read.tokenize_str(text)
        exact = self._read.decode_bytes(ids) == text.encode("utf-8")
        return ids if exact else self._read.greedy_tokenize(text)


class _RejectedError(Exception):
    """llguidance rejects a grammar or a token."""


class Matchers:
    def __init__(self, tokenizer: str, vocab_size: int, stops: list[int]) -> None:
        """Read the tokenizer. Raises ValueError if llguidance cannot use it."""
        parsed = json.loads(Path(tokenizer).read_text(encoding="utf-8-sig"))
        # Forced text may be longer than the tokenizer's limit.
        text = json.dumps({**parsed, "truncation": None, "padding": None}, ensure_ascii=False)
        read = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=stops)
        exact = llguidance.TokenizerWrapper(ExactTokenizer(read))
        self._tokens = llguidance.LLTokenizer(exact, eos_token=stops)
        self._limits = llguidance.LLParserLimits(
            verbose_errors=False,  # else errors show the grammar
            max_lexer_states=_LEXER_STATES,
        )
        self._compiled: dict[str, llguidance.LLMatcher] = {}
        self._open: dict[int, llguidance.LLMatcher] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        for closed in request["closed"]:
            self._open.pop(closed, None)
        do = request["do"]
        if do == "special":
            ids = range(self._tokens.vocab_size)
            return {"special": [token for token in ids if self._tokens.is_special_token(token)]}
        if do == "compile":
            self._matcher(request["grammar"])
            return {}
        if do == "open":
            matcher = self._matcher(request["grammar"]).deep_copy()
            self._open[request["id"]] = matcher
        elif request["id"] not in self._open:
            return {"unknown": True}
        else:
            matcher = self._open[request["id"]]
        if request["tokens"] and not matcher.consume_tokens(request["tokens"]):
            raise _RejectedError(matcher.get_error() or "NoExtension")
        if do == "validate":
            stopped = matcher.is_stopped()
            return {"length": 0 if stopped else matcher.validate_tokens(request["draft"])}
        return _state(matcher)

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        """Return a matcher at the beginning of an answer, to be copied."""
        matcher = self._compiled.pop(grammar, None)
        if matcher is None:
            matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=self._limits)
            matcher.compute_bitmask()  # some faults appear only here
            if matcher.is_error():
                raise _RejectedError(matcher.get_error())
        self._compiled[grammar] = matcher  # the last one
        while len(self._compiled) > _COMPILED:
            del self._compiled[next(iter(self._compiled))]
        return matcher


def _state(matcher: llguidance.LLMatcher) -> dict[str, Any]:
    stopped = matcher.is_stopped()
    run = [] if stopped else matcher.compute_ff_tokens()
    mask = None
    if not run:
        mask = b64encode(matcher.compute_bitmask()).decode()  # at the end, of the stop tokens
    # The bits of a matcher with an error allow the stop tokens, wrongly.
    stuck = matcher.get_error() if matcher.is_error() else ""
    return {"stopped": stopped, "run": run, "mask": mask, "stuck": stuck}


def start(model: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that handles requests; `model` is JSON. See `system/guarded.py`."""
    try:
        answer = Matchers(**json.loads(model)).answer
    except ValueError as error:
        refusal = {"error": str(error), "unsupported": True, "seconds": 0.0}
        return lambda _: dict(refusal)

    def timed(request: dict[str, Any]) -> dict[str, Any]:
        started = time.thread_time()
        try:
            reply = answer(request)
        except _RejectedError as error:
            reply = {"error": str(error)}
        return {**reply, "seconds": time.thread_time() - started}

    return timed
