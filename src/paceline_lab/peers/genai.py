"""OpenVINO GenAI: plain decoding, and prompt lookup as its documentation sets it up.

It runs twice: with its default precision (8-bit KV cache, and the processor's fastest precision),
and with paceline's, since other rounding leads to other texts.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline_lab.peers.base import Answer, NotComparable, Peer, Question
from paceline_lab.peers.target import TargetModel

_OURS = {"KV_CACHE_PRECISION": "f16", "INFERENCE_PRECISION_HINT": "f32"}

_DRAFT_TOKENS, _NGRAM = 5, 3
"""From its guide to prompt lookup."""

PLAIN, LOOKUP = "plain", "lookup"


def open_peers(target: TargetModel) -> list[Peer]:
    """GenAI at its default precision and at paceline's.

    Raises NotComparable if the model is not for OpenVINO.
    """
    if target.files.engine != "openvino":
        raise NotComparable(
            f"{target.files.name} is a model for the engine {target.files.engine}; GenAI runs "
            "those for openvino; say --engine openvino"
        )
    return [GenAi("GenAI", target, {}), GenAi("GenAI f32", target, _OURS)]


class GenAi:
    """Two pipelines on one graph: prompt lookup is an option of the pipeline, not of a request."""

    packages: Sequence[str] = ("openvino-genai",)
    modes = (PLAIN, LOOKUP)

    def __init__(self, name: str, target: TargetModel, properties: Mapping[str, str]) -> None:
        """Load the model with these properties of the device."""
        import openvino_genai as genai

        self.name = name
        self.settings: Mapping[str, Any] = {
            "graph": "paceline's" if target.files.weights is None else "its own, of the GGUF file",
            "properties": dict(properties),
            "num_assistant_tokens": _DRAFT_TOKENS,
            "max_ngram_size": _NGRAM,
            "enable_prefix_caching": False,
        }
        options: dict[str, object] = {**properties, "scheduler_config": scheduler()}
        if target.threads is not None:
            options["INFERENCE_NUM_THREADS"] = target.threads
        model = str(target.files.weights or target.files.folder)
        self._target = target
        self._pipelines = {
            PLAIN: genai.LLMPipeline(model, "CPU", **options),
            LOOKUP: genai.LLMPipeline(model, "CPU", prompt_lookup=True, **options),
        }

    def answer(self, question: Question, max_tokens: int, mode: str) -> Answer:
        """See `Peer`. GenAI measures the times."""
        import openvino as ov
        import openvino_genai as genai

        stops = self._target.stops
        config = genai.GenerationConfig()
        config.do_sample = False
        config.max_new_tokens = max_tokens
        config.eos_token_id = stops[-1]
        config.stop_token_ids = set(stops)
        if mode == LOOKUP:
            config.num_assistant_tokens = _DRAFT_TOKENS
            config.max_ngram_size = _NGRAM
        ids = np.array([question.tokens], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        result = self._pipelines[mode].generate(inputs, config)
        first = result.perf_metrics.get_ttft().mean / 1e3
        whole = result.perf_metrics.get_generate_duration().mean / 1e3
        return self._target.answered(result.tokens[0], first, whole - first)


def scheduler() -> Any:
    """GenAI's defaults for a single request, without the prefix cache."""
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = sys.maxsize
    scheduler.enable_prefix_caching = False
    return scheduler
