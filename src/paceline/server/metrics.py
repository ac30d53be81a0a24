"""Usage and timing of answers: fields of their responses, and GET /metrics for Prometheus.

A response has OpenAI's usage, llama.cpp's timings and vLLM's speculation metrics. Invariants:
counts are consistent, as their readers check: a histogram's steps, accepted and draft tokens add up
to the corresponding fields; and counters of answers are exact sums of those fields. A cut answer
counts only in `requests_cut` and `cut_tokens`; the engine's counters include it. Its request also
counts as failed: `client_gone`, `request_timeout` or `draining`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.drafters import DrafterSpec
from paceline.runtime.batching.request import BatchRequest
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.decisions import Decisions
from paceline.runtime.embedding import Embedding
from paceline.server.errors import ApiError
from paceline.server.stream_text import Answer

disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = [step * 10.0**power for power in range(-3, 3) for step in (1, 2.5, 5)] + [1000.0]
"""Bounds of the histograms' buckets: a millisecond to a quarter of an hour."""

_COUNTERS = {
    "answers": "Answers that ended, by finish reason",
    "requests_refused": "Rejected requests, by reason",
    "requests_failed": "Failed requests, by reason",
    "prompt_tokens": "Prompt tokens of answers that ended: usage.prompt_tokens",
    "cached_prompt_tokens": "Prompt tokens from the cache: "
    "usage.prompt_tokens_details.cached_tokens",
    "generation_tokens": "Tokens of answers that ended: usage.completion_tokens",
    "embeddings": "Embedded texts",
    "embedded_tokens": "Tokens of embedded texts: usage.prompt_tokens of /v1/embeddings",
    "decisions": "Decided questions",
    "decided_tokens": "Tokens of inputs and questions: usage.input_tokens of /v1/decisions",
    # Sums of the responses' `speculation` and `metrics.speculative_decoding`.
    "steps": "Decode steps",
    "step_tokens": "Tokens of decode steps; divided by the steps: tokens per step",
    "drafts": "Decode steps with a draft",
    "draft_tokens": "Draft tokens",
    "accepted_tokens": "Accepted draft tokens",
    "forced_tokens": "Tokens forced by a grammar, without a draft",
    "accepted_tokens_per_position": "Steps that accepted the draft token at this position, "
    "counted from 0",
    "drafter_draft_tokens": "Draft tokens, by drafter",
    "drafter_accepted_tokens": "Accepted draft tokens, by drafter",
}
_LABELS = {
    "answers": ("finished_reason",),
    **dict.fromkeys(("requests_refused", "requests_failed"), ("reason",)),
    "accepted_tokens_per_position": ("position",),
    **dict.fromkeys(("drafter_draft_tokens", "drafter_accepted_tokens"), ("drafter",)),
}
"""Counters with several values -> the label that distinguishes them."""

_HISTOGRAMS = {
    "time_to_first_token_seconds": "Time to first token (TTFT), in seconds",
    "queue_seconds": "Time to first token without the prefill, in seconds",
    "time_per_output_token_seconds": "Time per output token (TPOT) after the first, mean of an "
    "answer, in seconds",
    "e2e_request_latency_seconds": "End-to-end latency, in seconds",
}


class Metrics(Collector):
    """The metrics of one served model, for the event loop's thread alone.

    Counters of the engine's thread may be one forward pass ahead of those of the answers.
    """

    def __init__(self, scheduler: Scheduler, name: str, fingerprint: str) -> None:
        """Start with zero counters; `name` is the model's in the API."""
        self._scheduler = scheduler
        self._info = {"version": __version__, "model": name, "fingerprint": fingerprint}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._counters = {
            name: Counter(f"paceline_{name}", text, _LABELS.get(name, ()), registry=self._registry)
            for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"paceline_{name}", text, buckets=_SECONDS, registry=self._registry)
            for name, text in _HISTOGRAMS.items()
        }

    def on_answer(self, request: BatchRequest, answer: Answer) -> None:
        result = answer.done
        stats = result.stats
        if request.index == 0:  # count a prompt once for all answers to it
            self._add("prompt_tokens", result.prompt_tokens)
            self._add("cached_prompt_tokens", stats.cached_tokens)
        self._add("generation_tokens", answer.tokens)
        self._add("steps", stats.steps)
        self._add("step_tokens", stats.decoded)
        self._add("drafts", stats.drafted_at[0] if stats.drafted_at else 0)
        self._add("draft_tokens", stats.drafted)
        self._add("accepted_tokens", stats.accepted)
        self._add("forced_tokens", stats.forced)
        self._add_each("accepted_tokens_per_position", dict(enumerate(stats.accepted_at)))
        self._add_each("drafter_draft_tokens", stats.drafted_by)
        self._add_each("drafter_accepted_tokens", stats.accepted_by)
        self._add_each("answers", {str(answer.finish_reason): 1})
        waited = max(stats.first_token_seconds - stats.prefill_seconds, 0.0)
        seconds = {
            "e2e_request_latency_seconds": perf_counter() - answer.submitted,
            "time_to_first_token_seconds": stats.first_token_seconds,
            "queue_seconds": waited,
        }
        if stats.decoded:
            seconds["time_per_output_token_seconds"] = stats.decode_seconds / stats.decoded
        for name, value in seconds.items():
            self._histograms[name].observe(value)

    def on_embedding(self, embedding: Embedding) -> None:
        self._add("embeddings", 1)
        self._add("embedded_tokens", embedding.tokens)

    def on_decisions(self, decisions: Decisions) -> None:
        self._add("decisions", len(decisions.answers))
        self._add("decided_tokens", decisions.input_tokens)

    def on_error(self, error: ApiError) -> None:
        code, kind = error.fields["code"], error.fields["type"]
        unavailable = error.status == HTTPStatus.SERVICE_UNAVAILABLE
        failed = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR or code == "client_gone"
        name = "requests_failed" if failed and not unavailable else "requests_refused"
        self._add_each(name, {code or kind: 1})

    async def reply(self, _request: Request) -> Response:
        return exposition(self._registry.collect)

    def collect(self) -> Iterator[Metric]:
        """Yield the current load and the engine's work, including that for clients that left.

        The Prometheus client calls it.
        """
        info = GaugeMetricFamily("paceline_info", "The served model", labels=[*self._info])
        info.add_metric([*self._info.values()], 1)
        yield info
        scheduler, cache = self._scheduler, self._scheduler.prefix_cache
        load = scheduler.load
        gauges = {
            "requests_running": ("Requests that are running", load.running),
            "requests_waiting": ("Requests in the queue", load.waiting),
            "cache_usage": (
                "Fraction of the KV cache slots that running requests hold, 0 to 1",
                scheduler.usage,
            ),
            "cache_free_slots": ("Free slots of the KV cache", scheduler.engine.free_slots),
            "prompt_cache_tokens": (
                "Tokens in the prefix cache; tokens that entries share count for each",
                cache.tokens,
            ),
            "prompt_cache_entries": ("Entries of the prefix cache", len(cache)),
        }
        counters = {
            "engine_calls": ("Forward passes of the engine", load.calls),
            "engine_rows": (
                "Rows of forward passes: prompt tokens, and blocks of the last token and its draft",
                load.rows,
            ),
            "engine_seconds": ("Seconds in forward passes", load.call_seconds),
            "preemptions": (
                "Preemptions: KV of a request was freed for older ones, and recomputed later",
                load.preempted,
            ),
            "scheduler_faults": ("Errors of the scheduler that belong to no request", load.faults),
            "prompt_cache_queries": (
                "Prompt tokens looked up in the prefix cache",
                cache.queried_tokens,
            ),
            "prompt_cache_hits": ("Prompt tokens found in the prefix cache", cache.hit_tokens),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"paceline_{name}", text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"paceline_{name}", text, value)
        text = "Drafters that failed or were too slow, and were disabled for their request"
        yield _labelled("drafters_silenced", text, "drafter", dict(load.failed_drafters))
        text = "Requests that ended before their answer: clients gone, time limits, shutdown"
        yield _labelled("requests_cut", text, "reason", dict(load.cut))
        text = "Tokens of truncated answers, which no other counter includes"
        yield _labelled("cut_tokens", text, "reason", dict(load.cut_tokens))

    def _add(self, name: str, count: float) -> None:
        self._counters[name].inc(count)

    def _add_each(self, name: str, counts: Mapping[str, int] | Mapping[int, int]) -> None:
        for which, count in counts.items():
            self._counters[name].labels(str(which)).inc(count)


def exposition(collect: Callable[[], Iterable[Metric]]) -> Response:
    """Return a reply with metrics in Prometheus' text format."""
    registry: Any = SimpleNamespace(collect=collect)
    headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4, "cache-control": "no-store"}
    return Response(generate_latest(registry), headers=headers)


def _labelled(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"paceline_{name}", text, labels=[label])
    for which, value in values.items():
        family.add_metric([which], value)
    return family


def usage(
    prompts: Sequence[int], answers: Sequence[Answer], *, predicted: bool = False
) -> dict[str, Any]:
    """Return OpenAI's usage of answers, which may be unfinished.

    `prompts` are token counts, each counted once for all answers to the prompt; the answers are in
    the order of the prompts, the same number for each.
    """
    per_prompt = len(answers) // len(prompts)
    results = [answer.result for answer in answers]
    cached = [first.stats.cached_tokens for first in results[::per_prompt] if first is not None]
    prompt, completion = sum(prompts), sum(answer.tokens for answer in answers)
    costs: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
    }
    if thoughts := sum(answer.reasoning_tokens for answer in answers):
        costs["completion_tokens_details"] = {"reasoning_tokens": thoughts}
    if predicted:
        drafted = sum(result.stats.drafted_by.get("prediction", 0) for result in results if result)
        accepted = sum(
            result.stats.accepted_by.get("prediction", 0) for result in results if result
        )
        details = costs.setdefault("completion_tokens_details", {})
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = drafted - accepted
    return costs


def telemetry(answers: Sequence[Answer], *, steps: bool = False) -> dict[str, Any]:
    """Return fields for the root of a response, or a stream's last chunk, once the answers ended.

    With several answers they are null: their times overlap. With `steps`, each step is listed.
    """
    if len(answers) != 1:
        return {"timings": None, "metrics": None, "speculation": None, "settings": None}
    answer, result = answers[0], answers[0].done
    return {
        "timings": timings(answer),
        "metrics": {"speculative_decoding": speculative_decoding(answer, steps=steps)},
        "speculation": {
            "drafter": DrafterSpec.parse(result.drafter).without_folders,
            "policy": result.policy,
            "exact": result.exact,
            "exactness": {name: compared.as_dict() for name, compared in result.exactness.items()},
            "seed": result.seed,
            "drafted_by": result.stats.drafted_by,
            "accepted_by": result.stats.accepted_by,
            "forced": result.stats.forced,
            "steps": result.stats.steps,
            "tokens_per_step": result.stats.tokens_per_step,
        },
        "settings": {name: setting._asdict() for name, setting in result.settings.items()},
    }


def timings(answer: Answer) -> dict[str, Any]:
    """Return llama.cpp's timings, in milliseconds; without drafts the draft fields are absent."""
    stats = answer.done.stats
    computed = answer.done.prompt_tokens - stats.cached_tokens
    prompt_ms, predicted_ms = 1e3 * stats.prefill_seconds, 1e3 * stats.decode_seconds
    times = {
        "cache_n": stats.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, computed),
        "prompt_per_second": _ratio(1e3 * computed, prompt_ms),
        "predicted_n": answer.tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, stats.decoded),
        "predicted_per_second": stats.decode_tokens_per_second,
    }
    drafts = {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted}
    return {**times, **drafts} if stats.drafted else times


def speculative_decoding(answer: Answer, *, steps: bool = False) -> dict[str, Any]:
    """Return metrics, in vLLM's format, of the steps that had a draft."""
    verified = [step for step in answer.steps if step[0]]
    all_drafted, all_accepted = [drafted for drafted, _ in verified], [kept for _, kept in verified]
    drafted, accepted, longest = sum(all_drafted), sum(all_accepted), max(all_drafted, default=0)
    by_length = {
        str(length): _histogram([kept for tried, kept in verified if tried == length], length)
        for length in sorted({*all_drafted})
    }
    metrics: dict[str, Any] = {
        "mean_acceptance_length": 1 + _ratio(accepted, len(verified)),
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "acceptance_histogram": _histogram(all_accepted, longest),
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": len(verified),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": longest,
    }
    if steps:
        metrics["per_step_accepted"] = all_accepted
        metrics["per_step_drafted"] = all_drafted
    return metrics


def _histogram(values: Sequence[int], largest: int) -> list[int]:
    """Return counts of the values 0, 1, ... `largest`."""
    return [sum(value == number for value in values) for number in range(largest + 1)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
