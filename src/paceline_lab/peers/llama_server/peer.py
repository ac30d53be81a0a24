"""`llama-server` as a peer: plain, and each n-gram lookup with its default values.

Its lookups keep n-grams of earlier requests (one pool of n-grams for all, or a cache that is
never emptied), so every answer has a server of its own: nothing is reused, as with the other peers.
Times are the server's own; the client measures the time of the whole answer.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any

from paceline.errors import ModelError
from paceline.models import ModelFiles
from paceline.system.machine import cpu_cores
from paceline_lab.bench.turns import PromptTurn
from paceline_lab.peers.base import PeerAnswer
from paceline_lab.peers.llama_server.binary import PROGRAM, ServerBinary
from paceline_lab.peers.llama_server.process import ServerProcess

PLAIN = "plain"

_LONGEST_DRAFT = 64
"""Tokens, the default of ngram-mod; the KV cache needs room for them after the answer."""

_GREEDY = {
    "temperature": 0.0,
    # A model's file may set other values, which would also apply to greedy answers.
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "cache_prompt": False,
    "return_tokens": True,
}


class LlamaServer:
    """Starts a server for each answer, on the GGUF file itself."""

    name = PROGRAM

    def __init__(
        self,
        files: ModelFiles,
        binary: ServerBinary,
        context: int,
        *,
        threads: int | None,
        on_message: Callable[[str], None],
    ) -> None:
        """Start it once, so that its errors are raised before anything is measured.

        `context` is the tokens of the longest question and its answer; without `threads`, one per
        core that this process may use; `on_message` prints a note for the user.

        Raises ModelError if the model is not a GGUF file, or the server cannot load it.
        """
        if files.weights is None:
            raise ModelError(f"{files.name} is not a GGUF file")
        if binary.lacking:
            on_message(binary.lacking)
        self._files, self._program = files, binary.path
        self.modes: Sequence[str] = (PLAIN, *binary.lookups)
        options = [
            *("--ctx-size", str(context + _LONGEST_DRAFT + 1)),
            *("--threads", str(threads or cpu_cores())),
            *("--parallel", "1"),
            *("--device", "none"),  # as in the engine llamacpp
        ]
        self._options = ["--model", str(files.weights), *options]
        self.settings: Mapping[str, Any] = {
            "version": binary.version,
            "weights": files.weights.name,
            "options": options,
            "lookups": [*binary.lookups],
        }
        ServerProcess(self._program, self._options).close()

    def answer(self, question: PromptTurn, max_tokens: int, mode: str) -> PeerAnswer:
        body = {"prompt": [*question.tokens], "n_predict": max_tokens, **_GREEDY}
        speculation = [] if mode == PLAIN else ["--spec-type", mode]
        with closing(ServerProcess(self._program, [*self._options, *speculation])) as server:
            began = perf_counter()
            reply = server.ask("/completion", body)
            seconds = perf_counter() - began
        answer = self._read(reply, seconds)
        stops = self._files.stop_token_ids
        ends = (place for place, token in enumerate(reply["tokens"][:-1], 1) if token in stops)
        # The server ignored a stop token that paceline has: repeat the request up to that token.
        end = next(ends, None)
        return answer if end is None else self.answer(question, end, mode)

    def _read(self, reply: Mapping[str, Any], seconds: float) -> PeerAnswer:
        """Return the answer in a reply of /completion; `seconds` are the client's."""
        try:
            tokens = [int(token) for token in reply["tokens"]]
            times = reply["timings"]
            first, decode = times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3
            drafts = int(times.get("draft_n", 0)), int(times.get("draft_n_accepted", 0))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"its answer has no tokens and timings; fields: {[*reply]}") from error
        if not tokens:
            raise ModelError(
                "its answer has no token ids: this version does not support return_tokens"
            )
        count = len(tokens)
        while tokens and tokens[-1] in self._files.stop_token_ids:
            tokens.pop()
        text = self._files.tokenizer.continuation(tokens)
        return PeerAnswer(text, tokens, count, first, decode, seconds, drafts)
