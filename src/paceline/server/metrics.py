"""GET /metrics: what went on since the start, as Prometheus reads it.

Knows ended answers and the scheduler's load. Knows nothing of prompts or texts. The rules: what is
counted of answers is what their responses say, so that the sums agree to the token; and a value
that vLLM has too is told under both names, from one place, so that its tools read it.

Own names begin with `paceline_`: Prometheus keeps the colon, which vLLM's names have, for rules of
the user. Of answers whose clients left before their end nothing is counted but `client_gone`, and
what the engine did.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from paceline import __version__
from paceline.server.api.errors import Refused
from paceline.server.service import Ask, Service
from paceline.server.stream_text import Answer

_SECONDS = [step * 10.0**power for power in range(-3, 3) for step in (1, 2.5, 5)] + [1000.0]
"""Bounds of the histograms' buckets: a millisecond to a quarter of an hour."""


class Histogram:
    """How often values fell below which bound."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """One more value."""
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def tell(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Put what was seen into a family."""
        bounds = [*(f"{bound:g}" for bound in _SECONDS), "+Inf"]
        counts = map(float, accumulate(self._counts))
        family.add_metric(labels, list(zip(bounds, counts, strict=True)), self._sum)


class Series(NamedTuple):
    """One thing that is told, perhaps with several values."""

    name: str
    """Ours, without `paceline_`."""
    vllm: str
    """What vLLM calls it, without `vllm:`; empty: it has none."""
    help: str
    value: float | Mapping[str, int] | Histogram
    label: str = ""
    """What tells several values apart."""
    gauge: bool = False
    """Whether it can fall."""


class Metrics(Collector):
    """The metrics of one service.

    Not for several threads: answers are told of, and metrics asked for, in the event loop's. What
    the engine's thread counts may be a call further on than the answers.
    """

    def __init__(self, service: Service) -> None:
        """Nothing has happened yet."""
        self._service = service
        self._tokens = Counter[str]()
        self._steps = Counter[str]()
        self._drafted = Counter[str]()
        self._accepted = Counter[str]()
        self._positions = Counter[int]()
        self._ended = Counter[str]()
        self._refused = Counter[str]()
        self._failed = Counter[str]()
        self._first, self._whole = Histogram(), Histogram()
        self._each, self._idle = Histogram(), Histogram()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def answered(self, ask: Ask, answer: Answer) -> None:
        """An answer has ended."""
        result = answer.done
        stats = result.stats
        if ask.place == 0:  # several answers to a prompt say once what it was
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
        self._whole.observe(perf_counter() - answer.asked)
        self._first.observe(stats.first_token_seconds)
        self._idle.observe(max(stats.first_token_seconds - stats.prefill_seconds, 0.0))
        if stats.decoded:
            self._each.observe(stats.decode_seconds / stats.decoded)

    def refused(self, error: Refused) -> None:
        """A request got an error instead of its answer, or of the rest of it."""
        later = error.status == HTTPStatus.SERVICE_UNAVAILABLE
        ours = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR or error.about["code"] in _LEFT
        counter = self._failed if ours and not later else self._refused
        counter[error.about["code"] or error.about["type"]] += 1

    def routes(self) -> list[BaseRoute]:
        """The paths to ask at."""

        async def metrics(_request: Request) -> Response:
            headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4, "cache-control": "no-store"}
            return Response(generate_latest(self._registry), headers=headers)

        return [Route(before + "/metrics", metrics, methods=["GET"]) for before in ("/v1", "")]

    def collect(self) -> Iterator[Metric]:
        """All there is to tell, in Prometheus' form."""
        service = self._service
        about = GaugeMetricFamily(
            "paceline_info", "What is served", labels=["version", "model", "fingerprint"]
        )
        about.add_metric([__version__, service.name, service.fingerprint], 1)
        yield about
        model = {"engine": "0", "model_name": service.name}
        for series in [*self._now(), *self._engine(), *self._answers(), *self._speculation()]:
            yield _family(f"paceline_{series.name}", series, {})
            if series.vllm:
                yield _family(f"vllm:{series.vllm}", series, model)

    def _now(self) -> Iterator[Series]:
        scheduler, prompts = self._service.scheduler, self._service.scheduler.prompts
        running, waiting = scheduler.load.running, scheduler.load.waiting
        yield _gauge("requests_running", "num_requests_running", "Answers being written", running)
        yield _gauge("requests_waiting", "num_requests_waiting", "Requests in the queue", waiting)
        text = "Slots of the key/value cache that running requests hold, 0 to 1"
        yield _gauge("cache_usage", "kv_cache_usage_perc", text, scheduler.usage)
        text = "Slots that nobody holds"
        yield _gauge("cache_free_slots", "", text, scheduler.model.engine.free_slots)
        text = "Tokens in the prompt cache; those that several texts share count for each"
        yield _gauge("prompt_cache_tokens", "", text, prompts.tokens)
        yield _gauge("prompt_cache_entries", "", "Texts in the prompt cache", len(prompts))

    def _engine(self) -> Iterator[Series]:
        """What the engine did for anybody, also for those who left."""
        load, prompts = self._service.scheduler.load, self._service.scheduler.prompts
        yield Series("engine_calls", "", "Calls of the engine", load.calls)
        text = "Rows of engine calls: tokens of prompts, guesses, and the tokens before those"
        yield Series("engine_rows", "", text, load.rows)
        yield Series("engine_seconds", "", "Seconds in engine calls", load.call_seconds)
        text = "Requests that were preempted: their KV went to older ones, and was computed again"
        yield Series("preemptions", "num_preemptions", text, load.preempted)
        text = "Drafters that failed or took too long, and were silenced for their request"
        yield Series("drafters_silenced", "", text, dict(load.silenced), "drafter")
        yield Series("scheduler_faults", "", "Errors of no request's own", load.faults)
        text = "Prompt tokens that were looked up in the prompt cache"
        yield Series("prompt_cache_queries", "prefix_cache_queries", text, prompts.asked)
        text = "Prompt tokens that were found there"
        yield Series("prompt_cache_hits", "prefix_cache_hits", text, prompts.found)

    def _answers(self) -> Iterator[Series]:
        tokens = self._tokens
        text = "Answers that ended, by why"
        yield Series("answers", "request_success", text, self._ended, "finished_reason")
        text = "Requests that were not begun, by why; not those without a key"
        yield Series("requests_refused", "", text, self._refused, "reason")
        text = "Requests that did not end well, by why"
        yield Series("requests_failed", "", text, self._failed, "reason")
        text = "Prompt tokens of answers that ended: usage.prompt_tokens"
        yield Series("prompt_tokens", "prompt_tokens", text, tokens["prompt"])
        text = "Their prompt tokens from the cache: usage.prompt_tokens_details.cached_tokens"
        yield Series("cached_prompt_tokens", "", text, tokens["cached"])
        text = "Tokens of answers that ended: usage.completion_tokens"
        yield Series("generation_tokens", "generation_tokens", text, tokens["answer"])
        text = "Seconds from when an answer was asked for to its first token"
        name = "time_to_first_token_seconds"
        yield Series(name, name, text, self._first)
        text = "Seconds before the first token in which nothing was computed for it"
        yield Series("queue_seconds", "", text, self._idle)
        text = "Seconds a token after the first, the mean of each answer"
        name = "request_time_per_output_token_seconds"
        yield Series("time_per_output_token_seconds", name, text, self._each)
        text = "Seconds from when an answer was asked for to its end"
        name = "e2e_request_latency_seconds"
        yield Series(name, name, text, self._whole)

    def _speculation(self) -> Iterator[Series]:
        """What responses say in `speculation` and in `metrics.speculative_decoding`."""
        tokens, steps, name = self._tokens, self._steps, "spec_decode_num_"
        text = "Steps after the prompt"
        yield Series("steps", "", text, steps["all"])
        text = "Tokens of steps after the prompt; over their number: tokens per step"
        yield Series("step_tokens", "", text, steps["tokens"])
        text = "Steps in which something was drafted"
        yield Series("drafts", f"{name}drafts", text, steps["drafted"])
        text = "Tokens that were drafted"
        yield Series("draft_tokens", f"{name}draft_tokens", text, tokens["drafted"])
        text = "Drafted tokens that the model picked too"
        yield Series("accepted_tokens", f"{name}accepted_tokens", text, tokens["accepted"])
        text = "Tokens that came unguessed, because a grammar let nothing else come"
        yield Series("forced_tokens", "", text, tokens["forced"])
        text = "Steps in which the guess at this position was accepted; the first is at 0"
        positions = {str(place): count for place, count in sorted(self._positions.items())}
        vllm = f"{name}accepted_tokens_per_pos"
        yield Series("accepted_tokens_per_position", vllm, text, positions, "position")
        text = "Tokens that were drafted, by drafter"
        yield Series("drafter_draft_tokens", "", text, self._drafted, "drafter")
        text = "Drafted tokens that the model picked too, by drafter"
        yield Series("drafter_accepted_tokens", "", text, self._accepted, "drafter")


_LEFT = ("client_gone",)
"""What is no fault of the server's and still ended a request that had begun."""


def _gauge(name: str, vllm: str, text: str, value: float) -> Series:
    return Series(name, vllm, text, value, gauge=True)


def _family(name: str, series: Series, more: Mapping[str, str]) -> Metric:
    """A series under one of its names, with `more` labels."""
    values, labels = list(more.values()), [*more, *filter(None, [series.label])]
    value = series.value
    if isinstance(value, Histogram):
        histogram = HistogramMetricFamily(name, series.help, labels=labels)
        value.tell(histogram, values)
        return histogram
    kind = GaugeMetricFamily if series.gauge else CounterMetricFamily
    family = kind(name, series.help, labels=labels)
    if isinstance(value, Mapping):
        for which, one in value.items():
            family.add_metric([*values, which], one)
    else:
        family.add_metric(values, value)
    return family
