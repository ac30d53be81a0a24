"""paceline against llama.cpp (llama-cpp-python): same GGUF file, same prompts, in turns.

pip install llama-cpp-python
python benchmarks/against_llama_cpp.py --output benchmarks/results/llama-cpp.json
"""

import os
import tempfile
from pathlib import Path
from time import perf_counter

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from peers import OURS, OURS_PLAIN, Ours, Peer, arguments, report, run

import paceline
from paceline.bench.suite import load_suite
from paceline.models import DEFAULT_MODEL, Progress
from paceline.models.registry import REGISTRY
from paceline.models.wheel import fetch_member

PLAIN = "llama.cpp plain"
LOOKUPS = {"llama.cpp lookup 10": 10, "llama.cpp lookup 2": 2}
"""The settings that its documentation names for GPUs and for CPUs."""


class LlamaCpp:
    """One llama.cpp context, greedy."""

    def __init__(self, gguf: Path, stops: tuple[int, ...], drafts: int) -> None:
        self._stops = stops
        self._llama = llama_cpp.Llama(
            str(gguf),
            n_ctx=2048,
            n_threads=os.cpu_count(),
            verbose=False,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None,
        )

    def answer(self, tokens: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Token ids, and tokens per second after the first."""
        self._llama.reset()
        answer: list[int] = []
        began = 0.0
        for token in self._llama.generate(tokens, temp=0.0, repeat_penalty=1.0):
            if not answer:
                began = perf_counter()
            answer.append(token)
            if token in self._stops or len(answer) == max_tokens:
                break
        return answer, (len(answer) - 1) / (perf_counter() - began)


def main() -> None:
    """Run, print, and write the result where asked."""
    options = arguments(__doc__)
    suite = load_suite()
    model = paceline.load()
    model.measure()
    stops = model.files.stop_token_ids
    with tempfile.TemporaryDirectory() as folder:
        gguf = fetch_member(REGISTRY[DEFAULT_MODEL], Path(folder), Progress())
        contenders = {
            PLAIN: LlamaCpp(gguf, stops, 0),
            **{name: LlamaCpp(gguf, stops, drafts) for name, drafts in LOOKUPS.items()},
            OURS: Ours(model, "auto"),
            OURS_PLAIN: Ours(model, "none"),
        }
        peers = [Peer(name, PLAIN) for name in LOOKUPS]
        rows = run(model, suite, contenders, peers, options)
    about = {
        "command": "python benchmarks/against_llama_cpp.py",
        "llama_cpp_python": llama_cpp.__version__,
        "engine": model.engine.describe(),
        "suite_sha256": suite.sha256,
    }
    report(rows, about, options)


if __name__ == "__main__":
    main()
