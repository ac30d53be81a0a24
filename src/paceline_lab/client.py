"""A client of OpenAI-compatible servers: greedy requests from several clients at once.

The server counts tokens (`usage`), the client measures times. On a paceline server, each request
chooses plain or speculative decoding; other servers are configured at their start. A server may
draft, and prompts may be prefix cache hits.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from math import exp
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from paceline.cli.options import ApiKey, Served
from paceline.cli.servers import http_client, key_for, key_headers, served
from paceline.errors import InvalidRequest, ModelError, PacelineError

_TIMEOUT_SECONDS = 600.0

_FURTHER = ("repetition_penalty", "cache_prompt")
"""Fields that are not OpenAI's. A server that refuses one is asked again without them."""

PromptMessages = tuple[str, Sequence[Mapping[str, Any]]]
"""The id and the messages of a prompt."""

PLAIN, SPECULATION, AS_SERVED = "plain", "speculation", "as served"

_PACELINE: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {"cache_prompt": False, "speculation": {"drafter": "none"}},
    SPECULATION: {"cache_prompt": False},
}
"""Mode -> fields of a request to a paceline server."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A server's URL and model, and the fields of every request."""

    url: str
    """Base URL, for example `http://127.0.0.1:8000/v1`."""
    model: str
    max_tokens: int = 0
    key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The host and path, without a user and password."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] + parts.path


@dataclass(frozen=True, slots=True)
class Access:
    served_model: Served = None
    api_key: ApiKey = None


def connect(url: str, access: Access) -> Mapping[str, ServedModel]:
    """Return mode -> endpoint of the server at a base URL; plain decoding first.

    Raises InvalidRequest if no OpenAI-compatible server answers, or if it has several models and
    `access` does not choose one.
    """
    url = url.rstrip("/")
    key, name = key_for(url, access.api_key), access.served_model
    try:
        models = served(url, key)
    except PacelineError:
        if name is None:
            raise
        models = []  # a server need not list a model that is named
    names = [model["id"] for model in models]
    if name is None and names == [None]:
        raise InvalidRequest(f"{url} requires another API key; give it with --api-key")
    if name is None and not names:
        raise InvalidRequest(f"no server listens at {url}, or it has no model; start one there")
    if name is None and len(names) > 1:
        known = ", ".join(map(str, names[:8]))
        raise InvalidRequest(f"{url} has several models; name one with --served-model, as {known}")
    is_ours = any(model["owned_by"] == "paceline" for model in models)
    modes = _PACELINE if is_ours else {AS_SERVED: {}}
    model = name or str(names[0])
    return {mode: ServedModel(url, model, key=key, fields=fields) for mode, fields in modes.items()}


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    seconds: float
    """Time of the whole answer."""
    first: float | None = None
    """Seconds to the first delta with text; None if there was none."""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    """Draft tokens, which llama.cpp and paceline report."""
    text: str = ""
    """Text of the answer, reasoning included."""
    probability: float | None = None
    """Probability of the first token, if it was requested and reported (`logprobs`)."""
    error: str | None = None


def closed_loop(
    endpoint: ServedModel,
    prompts: Sequence[PromptMessages],
    *,
    clients: int,
    requests: int,
    watch: Callable[[int], None] = lambda _: None,
) -> list[Sample]:
    """Send `requests` in all from `clients`; each client waits for its last answer to end.

    Returns the samples in order of completion; `watch` is called with their number after each.
    """
    import asyncio

    import httpx

    remaining = islice(cycle(prompts), requests)
    samples: list[Sample] = []

    async def run() -> None:
        # A connection each: llama.cpp's server may close one while the next request is sent.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        kind, url = httpx.AsyncClient, endpoint.url
        async with http_client(kind, url, timeout=_TIMEOUT_SECONDS, limits=limits) as http:

            async def client() -> None:
                for prompt in remaining:
                    sample = await _send(http, endpoint, prompt)
                    if any(name in (sample.error or "") for name in _FURTHER):
                        sample = await _send(http, endpoint, prompt, without=_FURTHER)
                    samples.append(sample)
                    watch(len(samples))

            await asyncio.gather(*(client() for _ in range(clients)))

    asyncio.run(run())
    return samples


async def _send(
    client: Any, endpoint: ServedModel, prompt: PromptMessages, without: Sequence[str] = ()
) -> Sample:
    """Send one streaming request, without some of its fields, and read its answer."""
    import httpx

    started = perf_counter()
    name, messages = prompt
    body = {
        "model": endpoint.model,
        "messages": [*messages],
        "max_tokens": endpoint.max_tokens,
        # Greedy, whatever the server's defaults are. No seed: greedy decoding draws nothing, and
        # mlx-lm's server takes a request that has a seed out of its batch.
        "temperature": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.fields,
    }
    body = {name: value for name, value in body.items() if name not in without}
    read: dict[str, Any] = {}
    pieces: list[str] = []
    ended = False
    try:
        async with client.stream(
            "POST", f"{endpoint.url}/chat/completions", json=body, headers=key_headers(endpoint.key)
        ) as answer:
            await _check(answer)
            async for line in answer.aiter_lines():
                ended |= _read_line(line, started, read, pieces)
        if not ended:
            read["error"] = "the stream ended without a finish_reason or [DONE]"
    except httpx.HTTPError as error:
        read["error"] = f"{type(error).__name__}: {error}"
    except ModelError as error:
        read["error"] = str(error)
    except (ValueError, LookupError, TypeError, AttributeError):
        read["error"] = "an event is not a chat completion chunk"
    return Sample(name, perf_counter() - started, text="".join(pieces), **read)


async def _check(answer: Any) -> None:
    if answer.status_code != 200:
        await answer.aread()
        reason = _one_line(answer.text)
        key = "; give another API key with --api-key" if answer.status_code in (401, 403) else ""
        raise ModelError(f"status {answer.status_code}: {reason}{key}")


def _one_line(error: object) -> str:
    """Return the start of an error's text, which may be a page of HTML, without its line breaks."""
    return " ".join(str(error).split())[:200]


def _read_line(line: str, started: float, fields: dict[str, Any], pieces: list[str]) -> bool:
    """Read one event stream line into `fields` and `pieces`; return whether it ends the answer."""
    if not line.startswith("data:"):
        return False
    if line.removeprefix("data:").strip() == "[DONE]":
        return True
    ended = False
    chunk = json.loads(line.removeprefix("data:"))
    if error := chunk.get("error"):
        raise ModelError(_one_line(error))
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        ended |= bool(choice.get("finish_reason"))
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if text := thought + (delta.get("content") or ""):
            fields.setdefault("first", perf_counter() - started)
            pieces.append(text)
        if scores := (choice.get("logprobs") or {}).get("content"):
            fields.setdefault("probability", exp(scores[0]["logprob"]))
    if usage := chunk.get("usage"):
        fields["tokens"] = usage.get("completion_tokens", 0)
        fields["prompt_tokens"] = usage.get("prompt_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        fields["cached_tokens"] = details.get("cached_tokens") or 0
    if drafted := (chunk.get("timings") or {}).get("draft_n"):
        fields["drafted"] = int(drafted)
    return ended
