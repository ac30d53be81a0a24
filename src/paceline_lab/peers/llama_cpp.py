"""llama.cpp through llama-cpp-python: plain decoding, and its prompt lookup.

It runs the GGUF file itself, which may have fewer bits per weight than paceline's form of it.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from paceline_lab.peers.base import Answer, Peer, Question
from paceline_lab.peers.target import TargetModel

PLAIN = "plain"

_DRAFT_TOKENS = (10, 2)
"""Its documentation recommends the first for GPUs, the second for CPUs."""


def open_peers(target: TargetModel) -> list[Peer]:
    """llama.cpp.

    Raises ModelError if the model was not made from a GGUF file, or it cannot be fetched.
    """
    return [LlamaCpp(target)]


class LlamaCpp:
    """A context per mode: one with a draft model keeps the logits of every row."""

    name = "llama.cpp"
    packages: Sequence[str] = ("llama-cpp-python",)
    modes = (PLAIN, *(f"lookup {tokens}" for tokens in _DRAFT_TOKENS))

    def __init__(self, target: TargetModel) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        drafts = (None, *(LlamaPromptLookupDecoding(num_pred_tokens=n) for n in _DRAFT_TOKENS))
        self._target = target
        self._contexts = {
            mode: Llama(
                str(target.gguf),
                n_ctx=target.context + max(_DRAFT_TOKENS) + 1,
                n_threads=target.cores,
                n_threads_batch=target.cores,
                draft_model=draft,
                verbose=False,
            )
            for mode, draft in zip(self.modes, drafts, strict=True)
        }
        self.settings: Mapping[str, Any] = {
            "weights": target.gguf.name,
            "num_pred_tokens": list(_DRAFT_TOKENS),
            "threads": target.cores,
        }

    def answer(self, question: Question, max_tokens: int, mode: str) -> Answer:
        """See `Peer`."""
        context = self._contexts[mode]
        context.reset()  # or the prompt would be a cache hit
        answer: list[int] = []
        began = first = perf_counter()
        for token in context.generate(question.tokens, temp=0.0, repeat_penalty=1.0):
            if not answer:
                first = perf_counter()
            answer.append(token)
            if token in self._target.stops or len(answer) == max_tokens:
                break
        return self._target.answered(answer, first - began, perf_counter() - first)
