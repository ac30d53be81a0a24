"""`bench serve`: throughput and latency of any OpenAI-compatible server under load.

Closed loop: several clients; a client sends a request when its last answer has ended. Open loop:
requests at random times, at a fixed mean rate, however many wait (Poisson, seeded).
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import quantiles
from typing import Any

from paceline.models import Progress
from paceline.storage.report import Report
from paceline.verify.client import (
    LoadRun,
    ServedModel,
    closed_loop,
    json_object,
    key_for,
    model_of,
    run_load,
)
from paceline.verify.suite import SuitePrompt, load_suite
from paceline_lab.bench.record import Record, Row, here

_CLIENTS = (1, 8)
"""Numbers of clients of a load that names neither clients nor rates."""


def bench_serve(
    progress: Progress,
    *,
    url: str,
    model: str | None = None,
    api_key: str | None = None,
    clients: Sequence[int] = (),
    rates: Sequence[float] = (),
    requests: int,
    kinds: Sequence[str] = (),
    extra: str = "{}",
    suite: Path | None = None,
    max_tokens: int,
) -> Report:
    """Measure a server with every number of clients, and at every rate of requests per second.

    Raises InvalidRequest if there is no server at the URL, or a value is out of range.
    """
    prompts = load_suite(suite).only(kinds, None)
    url = url.rstrip("/")
    fields = json_object("--extra", extra)
    key = key_for(url, api_key)
    endpoint = ServedModel(url, model or model_of(url, key), max_tokens, key, fields)
    clients = clients or (() if rates else _CLIENTS)
    loads: list[tuple[str, Callable[..., LoadRun]]] = [
        *((f"{n} clients", partial(closed_loop, clients=n)) for n in clients),
        *((f"{rate:g} requests/s", partial(open_loop, rate=rate)) for rate in rates),
    ]
    runs = []
    for name, run in loads:
        with progress.task(
            f"requests to {endpoint.model}: {name}", requests, unit="requests"
        ) as reach:
            runs.append(run(endpoint, prompts.prompts, requests=requests, watch=reach))
    settings = {"url": url, "extra": fields, "max_tokens": max_tokens, "kinds": [*kinds]}
    record = Record(
        "serve",
        [_row(endpoint, run) for run in runs],
        settings={**settings, "requests": requests},
        suite_sha256=prompts.sha256,
        **here(),
    )
    rows = [_line(load_facts(run)) for run in runs]
    head = ("load", "tokens/s", "first token p50", "p99", "per token p50", "p99", "failed")
    passed = not any(row.facts["failed"] for row in record.rows)
    return Report(record.as_dict(), passed, tables=[(f"{endpoint.model} at {url}", head, rows)])


def _row(endpoint: ServedModel, run: LoadRun) -> Row:
    """Row of one load; measures of single requests have a value per request, not per round."""
    facts = load_facts(run)
    good = [sample for sample in run.samples if sample.error is None]
    measures = {
        "tokens_per_second": [facts.pop("tokens_per_second")],
        "requests_per_second": [facts.pop("requests_per_second")],
        "first_token_seconds": [sample.first for sample in good if sample.first is not None],
        "per_token_seconds": [
            seconds for sample in good if (seconds := sample.per_token) is not None
        ],
    }
    measured = {name: values for name, values in measures.items() if values}
    return Row(facts.pop("load"), "any", endpoint.model, measured, facts=facts)


def _line(run: dict[str, Any]) -> list[str]:
    def milliseconds(name: str, which: str) -> str:
        return "-" if run[name] is None else f"{run[name][which] * 1e3:.0f} ms"

    return [
        run["load"],
        f"{run['tokens_per_second']:.1f}",
        milliseconds("first_token", "p50"),
        milliseconds("first_token", "p99"),
        milliseconds("per_token", "p50"),
        milliseconds("per_token", "p99"),
        f"{run['failed']} of {run['requests']}",
    ]


def open_loop(
    endpoint: ServedModel,
    prompts: Sequence[SuitePrompt],
    *,
    rate: float,
    requests: int,
    seed: int = 0,
    watch: Callable[[int], None] = lambda _: None,
) -> LoadRun:
    """Send `requests` at `rate` per second on average, without waiting for answers."""
    gaps = random.Random(seed)

    async def run(send: Callable[[SuitePrompt], Any]) -> None:
        async def send_later(prompt: SuitePrompt, after: float) -> None:
            await asyncio.sleep(after)
            await send(prompt)

        at, pending = 0.0, []
        for prompt in islice(cycle(prompts), requests):
            pending.append(send_later(prompt, at))
            at += gaps.expovariate(rate)
        await asyncio.gather(*pending)

    return asyncio.run(run_load(f"{rate:g} requests/s", endpoint, run, watch))


def load_facts(run: LoadRun) -> dict[str, Any]:
    """JSON of the requests under one load; times in seconds."""
    good = [sample for sample in run.samples if sample.error is None]
    tokens = sum(sample.tokens for sample in good)
    return {
        "load": run.load,
        "seconds": run.seconds,
        "requests": len(run.samples),
        "failed": len(run.samples) - len(good),
        "errors": sorted({sample.error for sample in run.samples if sample.error}),
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "cached_tokens": sum(sample.cached_tokens for sample in good),
        "completion_tokens": tokens,
        "tokens_per_second": tokens / run.seconds,
        "requests_per_second": len(good) / run.seconds,
        "first_token": percentiles(sample.first for sample in good if sample.first is not None),
        "per_token": percentiles(
            seconds for sample in good if (seconds := sample.per_token) is not None
        ),
    }


def percentiles(values: Iterator[float]) -> dict[str, float] | None:
    """Median, 90th and 99th percentile and maximum; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    cuts = quantiles(ordered, n=100, method="inclusive") if len(ordered) > 1 else ordered * 99
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": ordered[-1]}
