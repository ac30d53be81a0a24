"""Requests from a file, without a socket: `paceline batch`.

A line is a request in the format of OpenAI's Batch API, which uses the server's own endpoint, or a
prompt with options of `Model.generate`. So checks, errors and responses match those of the server
and of Python.

With --ray, the model is in an actor on each machine of a Ray cluster.

Invariants: the `id` of a response depends on its line, the model and the options, so a file of
responses can only be continued by the run that started it; and an actor or a node that dies loses
no line. Another actor takes over its lines, and a replacement starts as soon as the cluster has
room.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, cast

import httpx

from paceline.errors import InvalidRequest, MissingExtra, ModelError, PacelineError, pip_install
from paceline.models import check_unicode
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.runtime.prompt import Prompt
from paceline.server.api.chat import Chat
from paceline.server.api.completions import Completions
from paceline.server.api.decisions import DecisionsBody, decision_request
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

_LINES = 16
"""Maximum lines in an actor's batch."""
_MAX_FAILURES = 5
"""Maximum consecutive actor failures."""


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
        used = {} if line.url else self._defaults
        return f"batch_req_{digest_of([line.custom_id, line.url, line.body, used, self.identity])}"

    def response(self, line: Line, status: int, body: Any) -> dict[str, Any]:
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
                decision_request(self._service, parse(DecisionsBody, _body(line)))
            elif line.url == EMBEDDINGS:
                self._service.embeddings(parse(EmbeddingsBody, _body(line)))
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


class Worker:
    """A loaded model in its own process."""

    def __init__(self, load: Callable[[], Any], settings: Settings, options: Options) -> None:
        """Load the model; `load` takes no arguments."""
        self._offline = Offline(load(), settings, options).__enter__()

    def identity(self) -> Mapping[str, str]:
        return self._offline.identity

    def faults(self, lines: Sequence[Line]) -> list[str | None]:
        return self._offline.faults(lines)

    async def answers(self, lines: Sequence[Line]) -> list[dict[str, Any]]:
        machine = self._offline.machine
        return [answer | {"machine": machine} async for answer in self._offline.responses(lines)]


class RayOffline(Responder):
    """Works like `Offline`, with one actor per machine."""

    def __init__(
        self,
        address: str,
        cpus: int | None,
        load: Callable[[], Any],
        settings: Settings,
        options: Options,
    ) -> None:
        """Connect to a cluster, or start a local one if `address` is `local`; wait for one model.

        `cpus` is the number per actor; None: all CPUs of the smallest machine. Raises MissingExtra
        without Ray, and ModelError if no actor can be started.
        """
        try:
            import ray
        except ImportError as error:
            raise MissingExtra(f"--ray needs Ray: {pip_install('ray')}") from error
        self._ray = ray
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ModelError(f"cannot reach a Ray cluster at {address}: {error}") from error
        nodes = [node for node in ray.nodes() if node["Alive"]]
        have = [int(node["Resources"].get("CPU", 0)) for node in nodes]
        if cpus and cpus > max(have, default=0):
            ray.shutdown()
            raise InvalidRequest(
                f"--cpus {cpus}: the largest machine of the cluster has {max(have, default=0)}"
            )
        each = cpus or max(min(filter(None, have), default=1), 1)
        kind: Any = ray.remote(Worker).options(num_cpus=each, scheduling_strategy="SPREAD")
        self._start: Callable[[], Any] = lambda: kind.remote(load, settings, options)
        self._workers = [self._start() for _ in range(max(sum(n // each for n in have), 1))]
        try:
            identity = ray.get(self._workers[0].identity.remote())
        except ray.exceptions.RayError as error:
            self.__exit__()
            raise ModelError(f"no actor can load the model: {_reason(error)}") from error
        super().__init__(identity, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def faults(self, lines: Sequence[Line]) -> list[str | None]:
        """Return why each line would be rejected, or None."""
        found: list[str | None] = self._ray.get(self._workers[0].faults.remote(lines))
        return found

    async def responses(self, lines: Sequence[Line]) -> AsyncIterator[dict[str, Any]]:
        """Yield the response of each line. Raises ModelError if actors keep dying."""
        ordered = iter(sorted(lines, key=lambda line: line.text))
        groups = deque[list[Line]]()
        while group := [*islice(ordered, _LINES)]:
            groups.append(group)
        running: dict[asyncio.Future[Any], tuple[Any, list[Line]]] = {}

        def ask(worker: Any, group: list[Line]) -> None:
            reference = worker.answers.remote(group) if group else worker.identity.remote()
            running[asyncio.wrap_future(reference.future())] = worker, group

        for worker in self._workers:
            ask(worker, [])  # answered once its model is loaded
        failures, errors = 0, self._ray.exceptions
        while groups or any(group for _, group in running.values()):
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                worker, group = running.pop(future)
                try:
                    found = future.result()
                except (errors.RayActorError, errors.ObjectLostError) as error:
                    failures += 1
                    if failures > _MAX_FAILURES:
                        raise ModelError(f"actors keep dying: {_reason(error)}") from error
                    if group:
                        groups.appendleft(group)
                    ask(self._start(), [])
                    continue
                if group:
                    failures = 0
                    for answer in found:
                        yield answer
                elif found != self.identity:
                    raise ModelError(
                        "a machine of the cluster has a different model than the first one"
                    )
                if groups:
                    ask(worker, groups.popleft())


def _reason(error: BaseException) -> str:
    """Return the last line of an error that has the traceback of another process."""
    return str(error).strip().splitlines()[-1].strip()
