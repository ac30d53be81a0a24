"""The runtimes as a worker process has them: one GGUF file, calls of n rows, prompts of n tokens.

Independent of processes and records. A runtime imports its packages when it is opened. Prompts are
random tokens, so that no cache of earlier prompts helps.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

CONTEXT = 128
"""Tokens before the rows of a call."""

_DECODED = 16
"""Tokens of an answer, for a runtime that can only be asked for answers."""

_BATCH = 512
"""Most rows of a call: llama.cpp's default, and paceline's prompt chunks."""


class CallRuntime(Protocol):
    """A runtime with a model loaded."""

    packages: Sequence[str]
    """Packages whose versions a record has."""
    facts: Mapping[str, Any]
    """For the record, as JSON."""

    def prompt(self, tokens: Sequence[int]) -> float:
        """Seconds from a prompt to the best next token."""
        ...

    def rows(self, count: int) -> float | None:
        """Seconds of a call of `count` rows of one sequence after `CONTEXT` tokens.

        With their best tokens. One row is plain decoding. None: it cannot be asked for such calls.
        """
        ...


class Paceline:
    """paceline's own engine, as it is loaded by default."""

    packages: Sequence[str] = ()

    def __init__(self, gguf: Path, *, threads: int, context: int) -> None:
        from paceline.decoding.types import Block
        from paceline.runtime.load import load

        model = load(gguf, threads=threads, cache_tokens=context + 2 * CONTEXT)
        self._engine, self._block = model.engine, Block
        self.facts: Mapping[str, Any] = {
            "engine": model.engine.describe(),
            "fingerprint": model.files.fingerprint,
        }
        self._sequence = self._engine.open()
        self._step(self._sequence, Block(_tokens(CONTEXT), 0, prefill=True))
        self._sequence.commit(CONTEXT)

    def prompt(self, tokens: Sequence[int]) -> float:
        """See `CallRuntime`."""
        sequence = self._engine.open()
        started = perf_counter()
        for at in range(0, len(tokens), _BATCH):
            chunk = tokens[at : at + _BATCH]
            last = at + _BATCH >= len(tokens)
            self._step(sequence, self._block(chunk, int(last), prefill=True))
            sequence.commit(len(chunk))
        taken = perf_counter() - started
        sequence.close()
        return taken

    def rows(self, count: int) -> float | None:
        """See `CallRuntime`."""
        tokens = _tokens(count)
        started = perf_counter()
        self._step(self._sequence, self._block(tokens, count))
        return perf_counter() - started

    def _step(self, sequence: Any, block: Any) -> None:
        for logits in self._engine.step([(sequence, block)]).logits:
            if len(logits):
                logits.argmax(axis=1)


class LlamaCpp:
    """llama.cpp through the low-level functions of llama-cpp-python, with its defaults."""

    packages: Sequence[str] = ("llama-cpp-python",)

    def __init__(self, gguf: Path, *, threads: int, context: int) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        llama_cpp.llama_backend_init()
        defaults = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), defaults)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {gguf}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context + 2 * CONTEXT
        params.n_batch = _BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp cannot open a context of {params.n_ctx} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary: int = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self.facts: Mapping[str, Any] = {}
        self._decode(_tokens(CONTEXT), 0, 1)

    def prompt(self, tokens: Sequence[int]) -> float:
        """See `CallRuntime`."""
        self._forget(0)
        started = perf_counter()
        for at in range(0, len(tokens), _BATCH):
            self._decode(tokens[at : at + _BATCH], at, int(at + _BATCH >= len(tokens)))
        taken = perf_counter() - started
        self._forget(0)
        self._decode(_tokens(CONTEXT), 0, 1)
        return taken

    def rows(self, count: int) -> float | None:
        """See `CallRuntime`."""
        self._forget(CONTEXT)
        tokens = _tokens(count)
        started = perf_counter()
        self._decode(tokens, CONTEXT, count)
        return perf_counter() - started

    def _forget(self, length: int) -> None:
        """Drop the sequence's tokens from `length` on."""
        self._lib.llama_memory_seq_rm(self._memory, 0, length, -1)

    def _decode(self, tokens: Sequence[int], past: int, logit_rows: int) -> None:
        """Run one call, and pick the best token of its last `logit_rows` rows."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, past + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = row >= count - logit_rows
        if self._lib.llama_decode(self._context, batch):
            raise ValueError(f"llama.cpp cannot run {count} rows at a context of {past} tokens")
        for row in range(count - logit_rows, count):
            logits = self._lib.llama_get_logits_ith(self._context, row)
            np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax()


class GenAi:
    """OpenVINO GenAI, which reads the file itself; with its defaults but the prefix cache."""

    packages: Sequence[str] = ("openvino-genai",)

    def __init__(self, gguf: Path, *, threads: int, context: int) -> None:
        import openvino_genai as genai

        from paceline_lab.peers.genai import scheduler

        options = {"INFERENCE_NUM_THREADS": threads, "scheduler_config": scheduler()}
        self._pipeline = genai.LLMPipeline(str(gguf), "CPU", **options)
        self.facts: Mapping[str, Any] = {"enable_prefix_caching": False}

    def prompt(self, tokens: Sequence[int]) -> float:
        """See `CallRuntime`."""
        return self._generate(tokens, 1)[0]

    def rows(self, count: int) -> float | None:
        """See `CallRuntime`; the mean of several tokens."""
        if count > 1:
            return None
        first, whole = self._generate(_tokens(CONTEXT), _DECODED + 1)
        return (whole - first) / _DECODED

    def _generate(self, prompt: Sequence[int], count: int) -> tuple[float, float]:
        """Seconds to the first token, and to the last, of an answer of `count` tokens."""
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.do_sample, config.ignore_eos, config.max_new_tokens = False, True, count
        ids = np.array([prompt], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        metrics = self._pipeline.generate(inputs, config).perf_metrics
        return metrics.get_ttft().mean / 1e3, metrics.get_generate_duration().mean / 1e3


RUNTIMES: Mapping[str, Callable[..., CallRuntime]] = {
    "paceline": Paceline,
    "llama-cpp-python": LlamaCpp,
    "openvino-genai": GenAi,
}
"""By the name of `--peer`."""

_rng = np.random.default_rng()


def _tokens(count: int) -> list[int]:
    """Random tokens that every vocabulary has."""
    return [int(token) for token in _rng.integers(3, 250, count)]


def prompt_of(count: int) -> list[int]:
    """A prompt of `count` random tokens."""
    return _tokens(count)
