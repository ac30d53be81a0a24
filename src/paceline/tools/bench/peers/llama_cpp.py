"""llama.cpp through llama-cpp-python: plain decoding, and its prompt lookup.

The GGUF file itself, so fewer bits a weight than paceline's form of it has.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from paceline.tools.bench.peers.base import Answer, Peer, Question
from paceline.tools.bench.peers.target import Target

PLAIN = "plain"

_DRAFT_TOKENS = (10, 2)
"""Its documentation names the first for GPUs, the second for machines with CPUs only."""


def open_peers(target: Target) -> list[Peer]:
    """llama.cpp.

    Raises:
        ModelError: the model was not made from a GGUF file, or it cannot be fetched.
    """
    return [LlamaCpp(target)]


class LlamaCpp:
    """A context for each way: one with a draft model keeps every row's logits."""

    name = "llama.cpp"
    packages: Sequence[str] = ("llama-cpp-python",)
    ways = (PLAIN, *(f"lookup {tokens}" for tokens in _DRAFT_TOKENS))

    def __init__(self, target: Target) -> None:
        """Open it."""
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        drafts = (None, *(LlamaPromptLookupDecoding(num_pred_tokens=n) for n in _DRAFT_TOKENS))
        self._target = target
        self._contexts = {
            way: Llama(
                str(target.gguf),
                n_ctx=target.context + max(_DRAFT_TOKENS) + 1,
                n_threads=target.cores,
                n_threads_batch=target.cores,
                draft_model=draft,
                verbose=False,
            )
            for way, draft in zip(self.ways, drafts, strict=True)
        }
        self.settings: Mapping[str, Any] = {
            "weights": target.gguf.name,
            "num_pred_tokens": list(_DRAFT_TOKENS),
            "threads": target.cores,
        }

    def answer(self, question: Question, max_tokens: int, way: str) -> Answer:
        """See `Peer`."""
        context = self._contexts[way]
        context.reset()  # or it would find the prompt in its cache
        answer: list[int] = []
        began = first = perf_counter()
        for token in context.generate(question.tokens, temp=0.0, repeat_penalty=1.0):
            if not answer:
                first = perf_counter()
            answer.append(token)
            if token in self._target.stops or len(answer) == max_tokens:
                break
        return self._target.answered(answer, first - began, perf_counter() - first)
