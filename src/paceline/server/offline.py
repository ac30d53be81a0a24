"""Requests from a file, without a socket: `paceline batch`.

A line is a request in the format of OpenAI's Batch API, which uses the server's own endpoint, or a
prompt with options of `Model.generate`. So checks, errors and responses match those of the server
and of Python.

Invariant: the `id` of a response depends on its line, the model and the options. A file of
responses can only be continued by the run that started it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import httpx

from paceline.errors import InvalidRequest, PacelineError
from paceline.models import check_unicode
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.runtime.prompt import Prompt
from paceline.server.api.chat import Chat
from paceline.server.api.completions import Completions
from paceline.server.api.decisions import decision_request
from paceline.server.api.endpoint import ApiRequest
from paceline.server.api.responses import Responses
from paceline.server.app import make_app
from paceline.server.body import EmbeddingsBody
from paceline.server.errors import ApiError, api_error
from paceline.server.json_body import parse
from paceline.server.service import Service
from paceline.server.settings import Settings
from paceline.storage.files import digest_of

EMBEDDINGS, DECISIONS = "/v1/embeddings", "/v1/decisions"

_KINDS: Mapping[str, type[ApiRequest[Any]]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
}

URLS = (*_KINDS, EMBEDDINGS, DECISIONS)

_JSON = {"content-type": "application/json"}

_FIELDS = ("custom_id", "method", "url", "body")

_RUNNING = 64
"""Requests that run concurrently if they share forward passes."""

_RUNNING_UNSHARED = 2
"""Otherwise one runs, while the next prompt is encoded."""


@dataclass(frozen=True, slots=True)
class Line:
    """A request in a file."""

    number: int
    """Line number, from 1."""
    custom_id: str
    url: str | None
    """The endpoint; None for a prompt with options."""
    body: dict[str, Any]

    @property
    def prompt(self) -> Prompt:
        return cast("Prompt", self.body.get("messages", self.body.get("prompt")))

    @property
    def options(self) -> Options:
        names = ("prompt", "messages")
        options: Any = {name: value for name, value in self.body.items() if name not in names}
        if isinstance(bias := options.get("logit_bias"), dict):  # JSON's keys are strings
            ids = {int(key) if key.isdecimal() else key: bias[key] for key in bias}
            options["logit_bias"] = ids
        return cast("Options", options)

    @property
    def text(self) -> str:
        """The prompt as text, to sort lines: equal prefixes become neighbors."""
        names = ("messages", "instructions", "prompt", "input")
        return json.dumps([self.url, *(self.body.get(name) for name in names)], ensure_ascii=False)


def line_of(number: int, value: Any) -> Line:
    """Return the request in a JSON value of a file. Raises InvalidRequest; a value may be one."""
    if isinstance(value, InvalidRequest):
        raise value
    if not isinstance(value, dict):
        raise InvalidRequest("is not a JSON object")
    custom_id = value.get("custom_id", f"line-{number}")
    if not (isinstance(custom_id, str) and custom_id):
        raise InvalidRequest("custom_id: expected a string with characters")
    check_unicode("custom_id", custom_id)
    if not {"url", "body"} & value.keys():
        body = {name: one for name, one in value.items() if name != "custom_id"}
        if ("prompt" in body) == ("messages" in body):
            raise InvalidRequest("expected a prompt, messages, or url and body")
        messages = body.get("messages", [])
        if not (isinstance(messages, list) and all(isinstance(one, dict) for one in messages)):
            raise InvalidRequest("messages: expected a list of objects")
        return Line(number, custom_id, None, body)
    if unknown := sorted(value.keys() - {*_FIELDS}):
        raise InvalidRequest(f"unknown field {unknown[0]!r}; expected {', '.join(_FIELDS)}")
    url, sent = value.get("url"), value.get("body")
    if value.get("method", "POST") != "POST":
        raise InvalidRequest(f"method is {value['method']!r:.80}; expected 'POST'")
    if url not in URLS:
        raise InvalidRequest(f"url is {url!r:.80}; expected {', '.join(URLS)}")
    if not isinstance(sent, dict):
        raise InvalidRequest("body: expected a JSON object")
    if sent.get("stream"):
        raise InvalidRequest("body.stream: a file has whole responses; remove it")
    return Line(number, custom_id, url, sent)


class Responder:
    """The responses of one model, with its ids, in OpenAI's format."""

    def __init__(self, identity: Mapping[str, str], defaults: Options) -> None:
        """`identity` names everything but the line that a response depends on."""
        self.identity, self._defaults = {**identity}, defaults

    def id_of(self, line: Line) -> str:
        """Return the id of a line's response."""
        used = {} if line.url else self._defaults
        return f"batch_req_{digest_of([line.custom_id, line.url, line.body, used, self.identity])}"

    def response(self, line: Line, status: int, body: Any) -> dict[str, Any]:
        """Return a line of a file of responses."""
        id = self.id_of(line)
        reply = {"status_code": status, "request_id": id, "body": body}
        return {"id": id, "custom_id": line.custom_id, "response": reply, "error": None}

    def refusal(self, line: Line, fault: str) -> dict[str, Any]:
        """Return the response to a faulty line."""
        return self.response(line, 400, ApiError(fault).body)


class Offline(Responder):
    """A model that answers lines with the server's endpoints. Use it in one event loop."""

    def __init__(self, model: Model, settings: Settings, defaults: Options) -> None:
        """Start the model's scheduler; `defaults` are options for lines that lack them."""
        kv = "q8_0" if "q8_0" in model.engine.describe().get("rows", "") else "f16"
        identity = {"model": model.files.fingerprint, "engine": model.files.engine, "kv": kv}
        super().__init__({**identity, "min_rows": str(model.engine.min_rows)}, defaults)
        self._model = model
        shares = model.engine.shares_calls
        self._at_once = _RUNNING if shares else _RUNNING_UNSHARED
        scheduler = model.open_scheduler(max_running=None if shares else 1)
        scheduler.start()
        self._service = Service(model, scheduler, settings)
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(make_app(self._service)),
            base_url="http://127.0.0.1",
            timeout=None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._service.close(0)

    @property
    def machine(self) -> str:
        """The kind of machine: its CPU, and the library that computes."""
        about = self._model.engine.describe()
        return ", ".join(about[name] for name in ("processor", "library") if name in about)

    def faults(self, lines: Sequence[Line]) -> list[str | None]:
        """Return why each line would be rejected, or None; grammars are not compiled."""
        return [self._fault(line) for line in lines]

    def _fault(self, line: Line) -> str | None:
        try:
            if line.url is None:
                queued = self._model._batch_request(line.prompt, self._options(line))
                self._model.scheduler.admission.limit(queued)
            elif line.url == DECISIONS:
                decision_request(self._service, _body(line))
            elif line.url == EMBEDDINGS:
                self._service.prepare(parse(EmbeddingsBody, _body(line)))
            else:
                kind = _KINDS[line.url]
                kind(self._service, parse(kind.body_kind, _body(line)), 0)
        except (ApiError, PacelineError) as error:
            return str(error)
        return None

    async def responses(self, lines: Sequence[Line]) -> AsyncIterator[dict[str, Any]]:
        """Yield each line's response when it is complete, in OpenAI's format.

        Lines whose prompts share a prefix run one after another, and share its KV.
        """
        waiting = iter(sorted(lines, key=lambda line: line.text))
        running = set[asyncio.Task[dict[str, Any]]]()
        try:
            while True:
                while len(running) < self._at_once and (line := next(waiting, None)):
                    running.add(asyncio.create_task(self._answer(line)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, line: Line) -> dict[str, Any]:
        if line.url is not None:
            reply = await self._client.post(line.url, content=_body(line), headers=_JSON)
            return self.response(line, reply.status_code, reply.json())
        try:
            stream = self._model.astream(line.prompt, **self._options(line))
            return self.response(line, 200, (await stream.finish()).as_dict())
        except Exception as error:
            failed = api_error(error)
            return self.response(line, failed.status, failed.body)

    def _options(self, line: Line) -> Options:
        return {**self._defaults, **line.options}


def _body(line: Line) -> bytes:
    return json.dumps(line.body).encode()
