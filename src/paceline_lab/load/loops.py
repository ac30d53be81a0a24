"""Load on an OpenAI-compatible server: throughput, time to first token, time per output token.

Closed loop (`paceline.verify.client`): several clients; a client sends a request when its last
answer has ended. Open loop: requests at random times, at a fixed mean rate, however many wait
(Poisson, seeded).
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from statistics import quantiles
from typing import Any

from paceline.verify.client import Endpoint, LoadRun, Sample, run_load
from paceline.verify.suite import SuitePrompt


def open_loop(
    endpoint: Endpoint,
    prompts: Sequence[SuitePrompt],
    *,
    rate: float,
    requests: int,
    seed: int = 0,
    watch: Callable[[Sample], None] = lambda _: None,
) -> LoadRun:
    """Send `requests` at `rate` per second on average, without waiting for answers."""
    gaps = random.Random(seed)

    async def run(send: Callable[[SuitePrompt], Any]) -> None:
        async def send_later(prompt: SuitePrompt, after: float) -> None:
            await asyncio.sleep(after)
            watch(await send(prompt))

        at, pending = 0.0, []
        for prompt in islice(cycle(prompts), requests):
            pending.append(send_later(prompt, at))
            at += gaps.expovariate(rate)
        await asyncio.gather(*pending)

    return asyncio.run(run_load(f"{rate:g} requests/s", endpoint, run))


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
