"""A client of OpenAI-compatible servers: greedy requests from several clients at once.

Tokens are counted by the server (`usage`), times by the client. Time per output token is the time
after the first delta over the tokens after the first: a delta may have several tokens.

A `Server` decodes in one or two modes. Plain decoding and speculation are compared if fields of a
request can select them. The fields of a paceline server are built in; those of another server are
options. Otherwise a server decodes as it was started: it may draft, and prompts may be prefix
cache hits.
"""

import asyncio
import ipaddress
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import InvalidRequest, PacelineError
from paceline.verify.suite import SuitePrompt

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
    return _served(url, key)[0][0]


def _served(url: str, key: str | None) -> list[tuple[str, Any]]:
    """`id` and `owned_by` of a server's models, one or more; errors as of `model_of`."""
    import httpx

    try:
        answer = httpx.get(f"{url}/models", headers=key_headers(key), timeout=30.0)
        answer.raise_for_status()
        models = answer.json()["data"]
        return [(str(model["id"]), model.get("owned_by")) for model in [models[0], *models[1:]]]
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
    except (ValueError, LookupError, TypeError, AttributeError) as error:
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


PLAIN, SPECULATION, AS_SERVED = "plain", "speculation", "as served"

_PACELINE = {
    PLAIN: {"cache_prompt": False, "speculation": {"drafter": "none"}},
    SPECULATION: {"cache_prompt": False},
}


@dataclass(frozen=True, slots=True)
class Access:
    """Options of requests to servers."""

    model: str | None = None
    """None: the first model of a server."""
    key: str | None = None
    plain: str | None = None
    """JSON: further fields of a request for plain decoding."""
    speculation: str | None = None
    """JSON: further fields of a request for speculation."""
    plain_url: str | None = None
    """Base URL of a second server, which was started without speculation and decodes plainly."""

    def check(self) -> None:
        """Raise InvalidRequest unless both fields are JSON objects, or both are missing.

        With a second server, one may be missing.
        """
        for name, text in (("--plain", self.plain), ("--speculation", self.speculation)):
            if text is not None and not isinstance(_parsed(text), dict):
                raise InvalidRequest(f"{name} is {text!r}; expected a JSON object")
        if self.plain_url is None and (self.plain is None) != (self.speculation is None):
            raise InvalidRequest(
                "--plain and --speculation go together: a server's plain answers are compared with "
                "its speculative ones; use {} for no further fields"
            )


class Server:
    """A server, its models and keys, and the fields of requests in each of its modes."""

    def __init__(self, url: str, access: Access) -> None:
        """Connect to the server at a base URL.

        Raises InvalidRequest if there is no OpenAI-compatible server at the URL.
        """
        url = url.rstrip("/")
        plain_url = (access.plain_url or url).rstrip("/")
        self._urls = {AS_SERVED: url, SPECULATION: url, PLAIN: plain_url}
        self._keys = {mode: key_for(address, access.key) for mode, address in self._urls.items()}
        model = access.model or model_of(url, self._keys[AS_SERVED])
        self._models = dict.fromkeys(self._urls, model)
        if access.plain_url is not None:
            self._models[PLAIN] = access.model or model_of(plain_url, self._keys[PLAIN])
        self.name = _shown(url)
        fields: Mapping[str, Any] = {AS_SERVED: {}}
        texts = {PLAIN: access.plain, SPECULATION: access.speculation}
        if access.plain_url is not None or access.plain is not None:
            fields = {mode: _parsed(text or "{}") for mode, text in texts.items()}
        elif _is_paceline(url, self._keys[AS_SERVED]):
            fields = _PACELINE
        self.modes = tuple(fields)
        self._fields = {mode: json.dumps(extra) for mode, extra in fields.items()}
        self.settings: Mapping[str, Any] = {"model": model, "fields": fields}
        if access.plain_url is not None:
            self.settings = {**self.settings, "plain_server": _shown(plain_url)}

    def endpoint(self, mode: str, max_tokens: int) -> Endpoint:
        """URL, model and fields of requests in one of `modes`."""
        return Endpoint(
            self._urls[mode], self._models[mode], max_tokens, self._keys[mode], self._fields[mode]
        )


def _shown(url: str) -> str:
    """Host and path of a URL, without a user and password."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] + parts.path


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_paceline(url: str, key: str | None) -> bool:
    """True if the server's models are owned by `paceline`."""
    try:
        return any(owner == "paceline" for _, owner in _served(url, key))
    except InvalidRequest:
        return False
