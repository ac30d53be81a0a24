"""Matches answers against grammars, with llguidance; `matcher_process.py` starts it.

A grammar comes with a request, and llguidance's own limits bound neither the time nor the memory of
one derivative of an intersection: 101 bytes took gigabytes. The kernel ends this process's child,
which answers, at a deadline in CPU seconds, and limits the address space of both.

Run as a script, so that it starts without importing paceline. Its argument is JSON, "tokenizer"
(path), "vocab_size" and "stops". Reads one request per line from standard input, writes one answer
per line to standard output, and ends with its input. Both JSON; a request has "seconds" and
"closed", the ids of matchers that are not needed any more:

    {"do": "special"}                         {"special": [token, ...]}
    {"do": "compile", "grammar"}              {}
    {"do": "open", "id", "grammar", "tokens"} the state after the tokens
    {"do": "push", "id", "tokens"}            the state after more tokens
    {"do": "validate", "id", "tokens", "draft"}  {"length": allowed tokens of the draft}

An answer is {"error": "..."} where llguidance rejects the tokenizer ("unsupported" beside it), the
grammar or a token, and {"unknown": true} for an unknown id. A state is

    {"stopped": bool, "run": [token, ...], "mask": base64 of a bit per token or null,
     "stuck": why no token is allowed next, "seconds": CPU seconds}

Answers come from a child of this process; for one that has ended see `WorkerProcess.ask`.
A run is text that is forced here, as the tokenizer encodes it; a state with a run has no mask.
"""

import gc
import json
import mmap
import os
import re
import signal
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import llguidance

_STACK = 256 * 2**20
"""Bytes of stack. llguidance recurses along chains of rules and references: grammars of 64 KiB
needed up to 64 MiB, and a stack overflow ends the process. Unused stack costs nothing."""

_MEMORY = _STACK + 3 * 2**29
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
    """The matchers of one model's answers."""

    def __init__(self, tokenizer: str, vocab_size: int, stops: list[int]) -> None:
        """Raises ValueError for a tokenizer that llguidance cannot use."""
        parsed = json.loads(Path(tokenizer).read_text(encoding="utf-8"))
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
        """The answer to a request."""
        for closed in request["closed"]:
            self._open.pop(closed, None)
        try:
            return self._answer(request)
        except _RejectedError as error:
            return {"error": str(error)}

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
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
        """A matcher at the beginning of an answer, to be copied."""
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


def main() -> None:
    """Answer requests until the input ends."""
    if sys.platform != "win32":
        import resource

        with suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a child to end
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGUSR1})
    threading.stack_size(_STACK)
    answer: Callable[[dict[str, Any]], dict[str, Any]]
    try:
        answer = Matchers(**json.loads(sys.argv[1])).answer
    except ValueError as error:
        refusal = {"error": str(error), "unsupported": True}
        answer = lambda _: dict(refusal)  # noqa: E731
    if sys.platform == "win32":
        _serve(answer, lambda: None)
    else:
        _serve_in_children(answer)


def _serve_in_children(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Serve in a child; when it is ended, write how, and serve on in another.

    A child has the vocabulary from its parent; reading it takes 0.6 s of 49,152 tokens, and 6 s of
    262,144 (2026-11-25, EPYC).
    """
    if sys.platform == "win32":
        raise OSError("this system has no fork")
    child, is_interrupted = 0, False

    def interrupt(*_: object) -> None:
        nonlocal is_interrupted
        if child:
            is_interrupted = True
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGUSR1, interrupt)
    read = mmap.mmap(-1, 8)  # requests, counted by the children

    def count() -> None:
        read[:] = (int.from_bytes(read[:]) + 1).to_bytes(8)

    gc.freeze()  # else a child's collector copies what it shares with its parent
    while True:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            os._exit(0 if _serve(answer, count) else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = 0
        if code == 0:
            return
        _write({"ended": code, "interrupted": is_interrupted, "read": int.from_bytes(read[:])})
        is_interrupted = False


def _serve(answer: Callable[[dict[str, Any]], dict[str, Any]], count: Callable[[], None]) -> bool:
    """Answer requests until the input ends; whether it has. Each that is read is counted."""
    has_ended = False

    def work() -> None:
        nonlocal has_ended
        for line in sys.stdin.buffer:
            count()
            request = json.loads(line)
            _end_after(request["seconds"])
            started = time.thread_time()
            reply = answer(request)
            reply["seconds"] = time.thread_time() - started
            _end_after(0)
            _write(reply)
        has_ended = True

    thread = threading.Thread(target=work)  # for its stack
    thread.start()
    thread.join()
    return has_ended


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _end_after(seconds: float) -> None:
    """Have a signal end this process after CPU seconds, even inside C code; 0: not any more."""
    if sys.platform != "win32":  # where the parent ends it
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
