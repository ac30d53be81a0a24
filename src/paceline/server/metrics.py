"""GET /metrics in Prometheus' text format: counters since the start.

Independent of prompts and texts. Invariants: the counters of answers are sums of the fields of
their responses, to the token; and a value that vLLM also has is exported under both names, so that
its tools work.

Our names begin with `paceline_`: Prometheus reserves the colon in vLLM's names for recording rules.
An answer that is cut counts in `requests_cut` and `cut_tokens` alone; the engine's counters include
it. Its request counts as failed, too: `client_gone`, `request_timeout` or `draining`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from time import perf_counter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from paceline import __version__
from paceline.runtime.batching.request import BatchRequest
from paceline.runtime.pooled import Embedding
from paceline.server.errors import ApiError
from paceline.server.service import Service
from paceline.server.stream_text import Answer

_SECONDS = [step * 10.0**power for power in range(-3, 3) for step in (1, 2.5, 5)] + [1000.0]
"""Bounds of the histograms' buckets: a millisecond to a quarter of an hour."""


class Series(NamedTuple):
    """One metric, perhaps with several values."""

    name: str
    """Our name, without `paceline_`."""
    vllm: str
    """vLLM's name, without `vllm:`; empty: vLLM has none."""
    help: str
    value: float | Mapping[str, int] | Histogram
    label: str = ""
    """The label that distinguishes several values."""
    gauge: bool = False
    """Whether it can decrease."""


class Metrics(Collector):
    """The metrics of one service.

    For the event loop's thread alone. Counters of the engine's thread may be one call ahead of
    those of the answers.
    """

    def __init__(self, service: Service) -> None:
        """Start with zero counters."""
        self._service = service
        self._tokens = Counter[str]()
        self._steps = Counter[str]()
        self._embedded = Counter[str]()
        self._drafted = Counter[str]()
        self._accepted = Counter[str]()
        self._positions = Counter[int]()
        self._ended = Counter[str]()
        self._rejected = Counter[str]()
        self._failed = Counter[str]()
        # They are exported under two names each, so none is registered.
        self._first_token, self._end_to_end, self._per_token, self._queue_time = (
            Histogram("seconds", "", buckets=_SECONDS, registry=None) for _ in range(4)
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def on_answer(self, request: BatchRequest, answer: Answer) -> None:
        """An answer has ended."""
        result = answer.done
        stats = result.stats
        if request.index == 0:  # count a prompt once for all answers to it
            self._tokens["prompt"] += result.prompt_tokens
            self._tokens["cached"] += stats.cached_tokens
        self._tokens["answer"] += answer.tokens
        self._steps["all"] += stats.steps
        self._steps["tokens"] += stats.decoded
        self._steps["drafted"] += stats.drafted_at[0] if stats.drafted_at else 0
        self._tokens["drafted"] += stats.drafted
        self._tokens["accepted"] += stats.accepted
        self._tokens["forced"] += stats.forced
        self._positions.update(dict(enumerate(stats.accepted_at)))
        self._drafted.update(stats.drafted_by)
        self._accepted.update(stats.accepted_by)
        self._ended[str(answer.finish_reason)] += 1
        self._end_to_end.observe(perf_counter() - answer.submitted)
        self._first_token.observe(stats.first_token_seconds)
        self._queue_time.observe(max(stats.first_token_seconds - stats.prefill_seconds, 0.0))
        if stats.decoded:
            self._per_token.observe(stats.decode_seconds / stats.decoded)

    def on_embedding(self, embedding: Embedding) -> None:
        """A text was embedded."""
        self._embedded["texts"] += 1
        self._embedded["tokens"] += embedding.tokens

    def on_error(self, error: ApiError) -> None:
        """A request ended with an error, perhaps in its stream."""
        code, kind = error.fields["code"], error.fields["type"]
        unavailable = error.status == HTTPStatus.SERVICE_UNAVAILABLE
        failed = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR or code == "client_gone"
        counter = self._failed if failed and not unavailable else self._rejected
        counter[code or kind] += 1

    def routes(self) -> list[BaseRoute]:
        """The routes of the metrics."""

        async def metrics(_request: Request) -> Response:
            headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4, "cache-control": "no-store"}
            return Response(generate_latest(self._registry), headers=headers)

        return [Route(prefix + "/metrics", metrics, methods=["GET"]) for prefix in ("/v1", "")]

    def collect(self) -> Iterator[Metric]:
        """All metrics; called by the Prometheus client."""
        service = self._service
        info = GaugeMetricFamily(
            "paceline_info", "The served model", labels=["version", "model", "fingerprint"]
        )
        info.add_metric([__version__, service.name, service.fingerprint], 1)
        yield info
        model = {"engine": "0", "model_name": service.name}
        for series in [*self._load(), *self._engine(), *self._answers(), *self._speculation()]:
            yield _family(f"paceline_{series.name}", series, {})
            if series.vllm:
                yield _family(f"vllm:{series.vllm}", series, model)

    def _load(self) -> Iterator[Series]:
        scheduler, cache = self._service.scheduler, self._service.scheduler.prefix_cache
        running, waiting = scheduler.load.running, scheduler.load.waiting
        yield _gauge(
            "requests_running", "num_requests_running", "Requests that are running", running
        )
        yield _gauge("requests_waiting", "num_requests_waiting", "Requests in the queue", waiting)
        text = "Fraction of the KV cache slots that running requests hold, 0 to 1"
        yield _gauge("cache_usage", "kv_cache_usage_perc", text, scheduler.usage)
        text = "Free slots of the KV cache"
        yield _gauge("cache_free_slots", "", text, scheduler.model.engine.free_slots)
        text = "Tokens in the prefix cache; tokens that entries share count for each"
        yield _gauge("prompt_cache_tokens", "", text, cache.tokens)
        yield _gauge("prompt_cache_entries", "", "Entries of the prefix cache", len(cache))

    def _engine(self) -> Iterator[Series]:
        """Work of the engine, also for clients that left."""
        load, cache = self._service.scheduler.load, self._service.scheduler.prefix_cache
        yield Series("engine_calls", "", "Calls of the engine", load.calls)
        text = "Rows of engine calls: prompt tokens, and blocks of the last token and its draft"
        yield Series("engine_rows", "", text, load.rows)
        yield Series("engine_seconds", "", "Seconds in engine calls", load.call_seconds)
        text = "Preemptions: KV of a request was freed for older ones, and recomputed later"
        yield Series("preemptions", "num_preemptions", text, load.preempted)
        text = "Drafters that failed or were too slow, and were silenced for their request"
        yield Series("drafters_silenced", "", text, dict(load.failed_drafters), "drafter")
        yield Series(
            "scheduler_faults", "", "Errors of the scheduler that belong to no request", load.faults
        )
        text = "Requests that ended before their answer: clients gone, time limits, shutdown"
        yield Series("requests_cut", "", text, dict(load.cut), "reason")
        text = "Tokens of answers that were cut, in no other counter of tokens"
        yield Series("cut_tokens", "", text, dict(load.cut_tokens), "reason")
        text = "Prompt tokens looked up in the prefix cache"
        yield Series("prompt_cache_queries", "prefix_cache_queries", text, cache.queried_tokens)
        text = "Prompt tokens found in the prefix cache"
        yield Series("prompt_cache_hits", "prefix_cache_hits", text, cache.hit_tokens)

    def _answers(self) -> Iterator[Series]:
        tokens = self._tokens
        text = "Answers that ended, by finish reason"
        yield Series("answers", "request_success", text, self._ended, "finished_reason")
        text = "Rejected requests, by reason"
        yield Series("requests_refused", "", text, self._rejected, "reason")
        text = "Failed requests, by reason"
        yield Series("requests_failed", "", text, self._failed, "reason")
        text = "Prompt tokens of answers that ended: usage.prompt_tokens"
        yield Series("prompt_tokens", "prompt_tokens", text, tokens["prompt"])
        text = "Prompt tokens from the cache: usage.prompt_tokens_details.cached_tokens"
        yield Series("cached_prompt_tokens", "", text, tokens["cached"])
        text = "Tokens of answers that ended: usage.completion_tokens"
        yield Series("generation_tokens", "generation_tokens", text, tokens["answer"])
        yield Series("embeddings", "", "Texts that were embedded", self._embedded["texts"])
        text = "Tokens of embedded texts: usage.prompt_tokens of /v1/embeddings"
        yield Series("embedded_tokens", "", text, self._embedded["tokens"])
        text = "Time to first token (TTFT), in seconds"
        name = "time_to_first_token_seconds"
        yield Series(name, name, text, self._first_token)
        text = "Time to first token without the prefill, in seconds"
        yield Series("queue_seconds", "", text, self._queue_time)
        text = "Time per output token (TPOT) after the first, mean of an answer, in seconds"
        name = "request_time_per_output_token_seconds"
        yield Series("time_per_output_token_seconds", name, text, self._per_token)
        text = "End-to-end latency, in seconds"
        name = "e2e_request_latency_seconds"
        yield Series(name, name, text, self._end_to_end)

    def _speculation(self) -> Iterator[Series]:
        """Sums of the responses' `speculation` and `metrics.speculative_decoding`."""
        tokens, steps, name = self._tokens, self._steps, "spec_decode_num_"
        text = "Decode steps"
        yield Series("steps", "", text, steps["all"])
        text = "Tokens of decode steps; divided by the steps: tokens per step"
        yield Series("step_tokens", "", text, steps["tokens"])
        text = "Decode steps with a draft"
        yield Series("drafts", f"{name}drafts", text, steps["drafted"])
        text = "Draft tokens"
        yield Series("draft_tokens", f"{name}draft_tokens", text, tokens["drafted"])
        text = "Accepted draft tokens"
        yield Series("accepted_tokens", f"{name}accepted_tokens", text, tokens["accepted"])
        text = "Tokens forced by a grammar, without a draft"
        yield Series("forced_tokens", "", text, tokens["forced"])
        text = "Steps that accepted the draft token at this position, counted from 0"
        positions = {str(place): count for place, count in sorted(self._positions.items())}
        vllm = f"{name}accepted_tokens_per_pos"
        yield Series("accepted_tokens_per_position", vllm, text, positions, "position")
        text = "Draft tokens, by drafter"
        yield Series("drafter_draft_tokens", "", text, self._drafted, "drafter")
        text = "Accepted draft tokens, by drafter"
        yield Series("drafter_accepted_tokens", "", text, self._accepted, "drafter")


def _gauge(name: str, vllm: str, text: str, value: float) -> Series:
    return Series(name, vllm, text, value, gauge=True)


def _family(name: str, series: Series, more: Mapping[str, str]) -> Metric:
    """A series under one of its names, with `more` labels."""
    values, labels = list(more.values()), [*more, *filter(None, [series.label])]
    value = series.value
    if isinstance(value, Histogram):
        histogram = Metric(name, series.help, "histogram")
        (metric,) = value.collect()
        for sample in metric.samples:
            if not sample.name.endswith("_created"):
                suffix = sample.name.removeprefix("seconds")
                histogram.add_sample(name + suffix, {**more, **sample.labels}, sample.value)
        return histogram
    kind = GaugeMetricFamily if series.gauge else CounterMetricFamily
    family = kind(name, series.help, labels=labels)
    if isinstance(value, Mapping):
        for which, one in value.items():
            family.add_metric([*values, which], one)
    else:
        family.add_metric(values, value)
    return family
