"""`llama-server` as a peer: plain, and each n-gram lookup with the values that it has by default.

Its lookups keep what earlier requests taught them (one pool of n-grams for all, or a cache that is
never emptied), so every answer has a server of its own: nothing is reused, as with the other peers.
Times are the server's own, the whole answer's those of its client.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any

from paceline.errors import ModelError
from paceline_lab.peers.base import PeerAnswer, Question, TargetModel
from paceline_lab.peers.llama_server.binary import PROGRAM, server_binary
from paceline_lab.peers.llama_server.process import ServerProcess

PLAIN = "plain"

_LONGEST_DRAFT = 64
"""Tokens, by default of ngram-mod; the KV cache needs room for them after the answer."""

_GREEDY = {
    "temperature": 0.0,
    # A model's file may have others, which a greedy answer would obey too.
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "cache_prompt": False,
    "return_tokens": True,
}


class LlamaServer:
    """A server for each answer, on the GGUF file itself."""

    name = PROGRAM
    packages: Sequence[str] = ()

    def __init__(self, target: TargetModel) -> None:
        """Start it once, so that an error of the server is one before anything is measured.

        Raises:
            MissingExtra: none was named, and none is on PATH.
            ModelError: the model was not made from a GGUF file, or the server cannot load it.
        """
        self._target = target
        self._binary = target.llama_server or server_binary(None)
        if lacking := self._binary.lacking:
            target.say(lacking)
        self.modes: Sequence[str] = (PLAIN, *self._binary.lookups)
        options = self._options(PLAIN)
        self.settings: Mapping[str, Any] = {
            "version": self._binary.version,
            "weights": target.gguf.name,
            "options": options[options.index("--ctx-size") :],
            "lookups": [*self._binary.lookups],
        }
        ServerProcess(self._binary.path, options).close()

    def answer(self, question: Question, max_tokens: int, mode: str) -> PeerAnswer:
        body = {"prompt": [*question.tokens], "n_predict": max_tokens, **_GREEDY}
        with closing(ServerProcess(self._binary.path, self._options(mode))) as server:
            began = perf_counter()
            reply = server.ask("/completion", body)
            seconds = perf_counter() - began
        answer = self._read(reply, seconds)
        stop = self._stop_place(reply["tokens"])
        # It has other tokens that end an answer: asked again for no more than ours.
        return answer if stop is None else self.answer(question, stop, mode)

    def _options(self, mode: str) -> list[str]:
        target = self._target
        speculation = [] if mode == PLAIN else ["--spec-type", mode]
        return [
            *("--model", str(target.gguf)),
            *("--ctx-size", str(target.context + _LONGEST_DRAFT + 1)),
            *("--threads", str(target.cores)),
            *("--parallel", "1"),
            *("--device", "none"),  # as the engine llamacpp
            *speculation,
        ]

    def _stop_place(self, tokens: Sequence[int]) -> int | None:
        """Number of tokens up to the first stop token, if others come after it."""
        stops = self._target.stops
        places = (place for place, token in enumerate(tokens[:-1], start=1) if token in stops)
        return next(places, None)

    def _read(self, reply: Mapping[str, Any], seconds: float) -> PeerAnswer:
        """The answer in a reply of /completion; `seconds` are the client's."""
        try:
            tokens = [int(token) for token in reply["tokens"]]
            times = reply["timings"]
            first, decode = times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3
            drafted, accepted = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"its answer has no tokens and timings; fields: {[*reply]}") from error
        if not tokens:
            raise ModelError(
                "its answer has no token ids: this version does not know return_tokens"
            )
        return self._target.answered(
            tokens, first, decode, seconds=seconds, draft=(int(drafted), int(accepted))
        )
