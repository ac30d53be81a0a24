"""A real server in a thread, and ways to talk to it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
from openai import OpenAI

from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.model import Model
from paceline.server.run import Server
from paceline.server.settings import Settings
from support.waiting import PATIENCE, until

CLIENT = OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0)
"""Made once: making one takes longer than most tests."""

HTTP = httpx.Client(timeout=PATIENCE)

SERVED = set[Model]()
"""Models with a server: its twin on the same engine is served by another one."""


def head(length: int | str, *more: str, path: str = "/v1/completions") -> bytes:
    """The headers of a request as they are sent."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def request(body: Any, *more: str) -> bytes:
    """A request for a completion as it is sent."""
    text = json.dumps(body).encode()
    return head(len(text), *more) + text


class Running:
    """A server that answers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url
        self.openai = CLIENT.with_options(base_url=f"{server.url}/v1")

    @property
    def model(self) -> Model:
        """The served model. Only for use while the server has no requests."""
        return self.server.service.model

    def rest(self) -> None:
        """Wait until the server is idle."""
        load = self.scheduler.load
        until(lambda: load.running == load.waiting == 0)

    @property
    def scheduler(self) -> Scheduler:
        return self.server.scheduler

    def get(self, path: str, **more: Any) -> httpx.Response:
        return HTTP.get(self.url + path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """Send a body; bytes go as they are, as JSON."""
        if isinstance(body, bytes):
            headers = {"content-type": "application/json", **more.pop("headers", {})}
            return HTTP.post(self.url + path, content=body, headers=headers, **more)
        return HTTP.post(self.url + path, json=body, **more)

    def events(self, path: str, body: Any, **more: Any) -> list[Any]:
        """Return the events of a successful stream: JSON, or text if they are not JSON."""
        response = self.post(path, {**body, "stream": True}, **more)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
        texts = [line.removeprefix("data: ") for line in lines]
        return [json.loads(text) if text.startswith("{") else text for text in texts]


def good(response: httpx.Response) -> Any:
    """Return the JSON of a successful response."""
    assert response.status_code == 200, response.text
    return response.json()


@contextmanager
def running(model: Model, settings: Settings | None = None, **more: Any) -> Iterator[Running]:
    """A server with `more` settings; a test that leaves requests behind in it fails."""
    if model in SERVED:
        model = Model(model.files, model.engine, defaults=model.defaults, drafting=model.drafting)
    SERVED.add(model)
    server = Server(model, replace(settings or Settings(), **more))
    ready = threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"on_line": lambda _: ready.set()})
    thread.start()
    try:
        assert ready.wait(PATIENCE), "the server does not listen"
        yield Running(server)
        assert server.scheduler.alive or server.scheduler.draining
    finally:
        server.stop()
        server.stop()  # at once
        thread.join(PATIENCE)
        assert not thread.is_alive()
        SERVED.remove(model)
    assert server.scheduler.load.running == server.scheduler.load.waiting == 0
