"""Load on an OpenAI-compatible server, and how it bears it: any server, ours or another's.

Closed loop: so many clients, each of which asks again when its answer has ended. Open loop:
requests come at random at a rate, whether or not the server keeps up (Poisson arrivals, seeded).
Tokens are those that the server counts in `usage`; times are the client's. Time per token is the
answer's time behind its first piece, over its other tokens: pieces may hold several.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import quantiles
from time import perf_counter
from typing import Any

from paceline.errors import InvalidRequest, MissingExtra, PacelineError
from paceline.tools.suite import SuitePrompt

_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Target:
    """Who is asked, and for what."""

    url: str
    """As `http://127.0.0.1:8000/v1`."""
    model: str
    max_tokens: int
    key: str | None = None
    extra: str = "{}"
    """JSON: more fields of every request."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    prompt: str
    started: float
    """Seconds since the run began."""
    ended: float
    first: float | None = None
    """Seconds to the first piece of text; None where none came."""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Seconds for each token behind the first."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.ended - self.started - self.first) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """What one kind of load brought."""

    load: str
    seconds: float
    samples: Sequence[Sample]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        good = [sample for sample in self.samples if sample.error is None]
        tokens = sum(sample.tokens for sample in good)
        return {
            "load": self.load,
            "seconds": self.seconds,
            "requests": len(self.samples),
            "failed": len(self.samples) - len(good),
            "errors": sorted({sample.error for sample in self.samples if sample.error}),
            "prompt_tokens": sum(sample.prompt_tokens for sample in good),
            "cached_tokens": sum(sample.cached_tokens for sample in good),
            "completion_tokens": tokens,
            "tokens_per_second": tokens / self.seconds,
            "requests_per_second": len(good) / self.seconds,
            "first_token": percentiles(one.first for one in good if one.first is not None),
            "per_token": percentiles(t for one in good if (t := one.per_token) is not None),
        }


def percentiles(values: Iterator[float]) -> dict[str, float] | None:
    """The median, the 90th and the 99th percentile, and the largest; None of nothing."""
    found = sorted(values)
    if not found:
        return None
    cuts = quantiles(found, n=100, method="inclusive") if len(found) > 1 else found * 99
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": found[-1]}


def model_of(url: str, key: str | None = None) -> str:
    """The first model that a server has.

    Raises:
        InvalidRequest: nobody answers there, or not as an OpenAI-compatible server does.
    """
    try:
        import httpx
    except ImportError as error:
        raise MissingExtra(f"{url} is asked with httpx: pip install httpx") from error
    try:
        answer = httpx.get(f"{url}/models", headers=_headers(key), timeout=30.0)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise InvalidRequest(f"{url}/models cannot be read: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidRequest(f"{url}/models is no list of models; is it a base URL?") from error


def closed_loop(
    target: Target,
    prompts: Sequence[SuitePrompt],
    *,
    clients: int,
    requests: int,
    watch: Callable[[Sample], None] = lambda _: None,
) -> Run:
    """`clients` who each ask again when they were answered, until `requests` have been asked."""
    waiting = islice(cycle(prompts), requests)

    async def run(ask: Callable[[SuitePrompt], Any]) -> None:
        async def client() -> None:
            for prompt in waiting:
                watch(await ask(prompt))

        await asyncio.gather(*(client() for _ in range(clients)))

    return asyncio.run(_run(f"{clients} client{'s' * (clients > 1)}", target, run))


def open_loop(
    target: Target,
    prompts: Sequence[SuitePrompt],
    *,
    rate: float,
    requests: int,
    seed: int = 0,
    watch: Callable[[Sample], None] = lambda _: None,
) -> Run:
    """`requests` that come at `rate` a second on average, whoever is still waiting."""
    gaps = random.Random(seed)

    async def run(ask: Callable[[SuitePrompt], Any]) -> None:
        async def one(prompt: SuitePrompt, after: float) -> None:
            await asyncio.sleep(after)
            watch(await ask(prompt))

        at, coming = 0.0, []
        for prompt in islice(cycle(prompts), requests):
            coming.append(one(prompt, at))
            at += gaps.expovariate(rate)
        await asyncio.gather(*coming)

    return asyncio.run(_run(f"{rate:g} requests/s", target, run))


async def _run(load: str, target: Target, run: Callable[[Any], Any]) -> Run:
    import httpx

    samples: list[Sample] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, limits=limits) as client:
        began = perf_counter()

        async def ask(prompt: SuitePrompt) -> Sample:
            sample = await _ask(client, target, prompt, began)
            samples.append(sample)
            return sample

        await run(ask)
        return Run(load, perf_counter() - began, samples)


async def _ask(client: Any, target: Target, prompt: SuitePrompt, began: float) -> Sample:
    """Ask once, and read the answer as it comes."""
    import httpx

    started = perf_counter()
    body = {
        "model": target.model,
        "messages": list(prompt.messages),
        "max_tokens": target.max_tokens,
        # Greedy, whatever the model's own settings are on that server.
        "temperature": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **json.loads(target.extra),
    }
    found: dict[str, Any] = {}
    pieces: list[str] = []
    try:
        async with client.stream(
            "POST", f"{target.url}/chat/completions", json=body, headers=_headers(target.key)
        ) as answer:
            await _check(answer)
            async for line in answer.aiter_lines():
                _take(line, started, found, pieces)
    except (httpx.HTTPError, _NotAnsweredError, ValueError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return Sample(prompt.id, started - began, perf_counter() - began, text="".join(pieces), **found)


async def _check(answer: Any) -> None:
    if answer.status_code != 200:
        await answer.aread()
        raise _NotAnsweredError(f"status {answer.status_code}: {answer.text[:200]}")


class _NotAnsweredError(PacelineError):
    """The server answered with an error."""


def _take(line: str, started: float, found: dict[str, Any], pieces: list[str]) -> None:
    """One line of the stream."""
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return
    chunk = json.loads(line.removeprefix("data:"))
    if "error" in chunk:
        raise _NotAnsweredError(str(chunk["error"]))
    for choice in chunk.get("choices") or ():
        if text := (choice.get("delta") or {}).get("content"):
            found.setdefault("first", perf_counter() - started)
            pieces.append(text)
    if usage := chunk.get("usage"):
        found["tokens"] = usage.get("completion_tokens", 0)
        found["prompt_tokens"] = usage.get("prompt_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        found["cached_tokens"] = details.get("cached_tokens") or 0


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
