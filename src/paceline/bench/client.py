"""A client of OpenAI-compatible servers: greedy requests from several clients at once.

Tokens are counted by the server (`usage`), times by the client. Time per output token is the time
after the first delta over the tokens after the first: a delta may have several tokens.
"""

import asyncio
import ipaddress
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from paceline.bench.suite import SuitePrompt
from paceline.errors import InvalidRequest, MissingExtra, PacelineError

_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's URL and model, and the fields of every request."""

    url: str
    """For example `http://127.0.0.1:8000/v1`."""
    model: str
    max_tokens: int
    key: str | None = None
    extra: str = "{}"
    """JSON object with further fields."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    prompt: str
    started: float
    """Seconds since the run began."""
    ended: float
    first: float | None = None
    """Seconds to the first delta with text; None if there was none."""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    """Draft tokens, as far as the server reports them."""
    text: str = ""
    """Of thoughts, too."""
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Time per output token after the first, in seconds."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.ended - self.started - self.first) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Requests under one load."""

    load: str
    seconds: float
    samples: Sequence[Sample]


def model_of(url: str, key: str | None = None) -> str:
    """The first model of a server.

    Raises InvalidRequest if there is no OpenAI-compatible server at the URL.
    """
    try:
        import httpx
    except ImportError as error:
        raise MissingExtra(f"requests to {url} need httpx: pip install httpx") from error
    try:
        answer = httpx.get(f"{url}/models", headers=key_headers(key), timeout=30.0)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise InvalidRequest(
            f"{url} requires another API key (status {status}); give it with --api-key"
            if status in (401, 403)
            else f"{url}/models has status {status}; expected a base URL as in "
            "http://127.0.0.1:8000/v1"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InvalidRequest(f"{url}/models cannot be read: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidRequest(f"{url}/models is no list of models; is it a base URL?") from error


def closed_loop(
    endpoint: Endpoint,
    prompts: Sequence[SuitePrompt],
    *,
    clients: int,
    requests: int,
    watch: Callable[[Sample], None] = lambda _: None,
) -> LoadRun:
    """Send `requests` in all from `clients`; a client sends one when its last answer has ended."""
    remaining = islice(cycle(prompts), requests)

    async def run(send: Callable[[SuitePrompt], Any]) -> None:
        async def client() -> None:
            for prompt in remaining:
                watch(await send(prompt))

        await asyncio.gather(*(client() for _ in range(clients)))

    return asyncio.run(run_load(f"{clients} client{'s' * (clients > 1)}", endpoint, run))


async def run_load(load: str, endpoint: Endpoint, run: Callable[[Any], Any]) -> LoadRun:
    """Call `run` with a function that sends a prompt and returns its `Sample`; all samples."""
    import httpx

    samples: list[Sample] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, limits=limits) as client:
        began = perf_counter()

        async def send(prompt: SuitePrompt) -> Sample:
            sample = await _send(client, endpoint, prompt, began)
            samples.append(sample)
            return sample

        await run(send)
        return LoadRun(load, perf_counter() - began, samples)


async def _send(client: Any, endpoint: Endpoint, prompt: SuitePrompt, began: float) -> Sample:
    """Send one streaming request and read its answer."""
    import httpx

    started = perf_counter()
    body = {
        "model": endpoint.model,
        "messages": list(prompt.messages),
        "max_tokens": endpoint.max_tokens,
        # Greedy, whatever the server's defaults are. No seed: there is nothing to draw, and
        # mlx-lm's server takes a request that has one out of its batch.
        "temperature": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **json.loads(endpoint.extra),
    }
    fields: dict[str, Any] = {}
    pieces: list[str] = []
    ended = False
    try:
        async with client.stream(
            "POST", f"{endpoint.url}/chat/completions", json=body, headers=key_headers(endpoint.key)
        ) as answer:
            await _check(answer)
            async for line in answer.aiter_lines():
                ended |= _read_line(line, started, fields, pieces)
        if not ended:
            fields["error"] = "the stream ended without a finish_reason or [DONE]"
    except httpx.HTTPError as error:
        fields["error"] = f"{type(error).__name__}: {error}"
    except _NotAnsweredError as error:
        fields["error"] = str(error)
    except (ValueError, LookupError, TypeError, AttributeError):
        fields["error"] = "an event is no chunk of a chat completion"
    return Sample(
        prompt.id, started - began, perf_counter() - began, text="".join(pieces), **fields
    )


async def _check(answer: Any) -> None:
    if answer.status_code != 200:
        await answer.aread()
        reason = _one_line(answer.text)
        key = "; give another API key with --api-key" if answer.status_code in (401, 403) else ""
        raise _NotAnsweredError(f"status {answer.status_code}: {reason}{key}")


def _one_line(error: object) -> str:
    """The start of an error's text, which may be a page of HTML, without its line breaks."""
    return " ".join(str(error).split())[:200]


class _NotAnsweredError(PacelineError):
    """The server returned an error."""


def _read_line(line: str, started: float, fields: dict[str, Any], pieces: list[str]) -> bool:
    """Read one line of the event stream into `fields` and `pieces`; whether it ends the answer."""
    if not line.startswith("data:"):
        return False
    if line.removeprefix("data:").strip() == "[DONE]":
        return True
    ended = False
    chunk = json.loads(line.removeprefix("data:"))
    if error := chunk.get("error"):
        raise _NotAnsweredError(_one_line(error))
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        ended |= bool(choice.get("finish_reason"))
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if text := thought + (delta.get("content") or ""):
            fields.setdefault("first", perf_counter() - started)
            pieces.append(text)
    if usage := chunk.get("usage"):
        fields["tokens"] = usage.get("completion_tokens", 0)
        fields["prompt_tokens"] = usage.get("prompt_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        fields["cached_tokens"] = details.get("cached_tokens") or 0
    if drafted := _drafted(chunk):
        fields["drafted"] = drafted
    return ended


def _drafted(chunk: dict[str, Any]) -> int:
    """Draft tokens of an answer, in the forms in which servers report them; 0 if none does."""
    timings, stats = chunk.get("timings") or {}, chunk.get("stats") or {}
    details = (chunk.get("usage") or {}).get("completion_tokens_details") or {}
    counts = (
        timings.get("draft_n"),  # llama.cpp and paceline, if they drafted
        stats.get("total_draft_tokens_count"),  # LM Studio
        (details.get("accepted_prediction_tokens") or 0)  # OpenAI's predicted outputs
        + (details.get("rejected_prediction_tokens") or 0),
    )
    return max(int(count or 0) for count in counts)


def key_for(url: str, key: str | None) -> str | None:
    """The API key for a server: `key`, or PACELINE_API_KEY if the server is on this machine.

    The variable has the key of the user's own server, so no other host gets it.
    """
    try:
        host = urlsplit(url).hostname or ""
        is_here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    return key or (os.environ.get("PACELINE_API_KEY") if is_here else None)


def key_headers(key: str | None) -> dict[str, str]:
    """The headers of a request with this API key."""
    return {"Authorization": f"Bearer {key}"} if key else {}
