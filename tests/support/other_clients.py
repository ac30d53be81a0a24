"""Other clients of a server while something fails there: none of them may notice."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from paceline.runtime.model import Model
from support.server import Running
from support.waiting import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: list[dict[str, Any]] = [
    {"prompt": "the rain in the rain", "max_tokens": 12, "temperature": 0},
    {"prompt": "one and two and one", "max_tokens": 12, "temperature": 1.1, "seed": 5},
]
LONG: dict[str, Any] = {
    "prompt": "this is the one",
    "max_tokens": 450,
    "ignore_eos": True,
    "temperature": 0,
    "speculation": {"drafter": "none"},
}
"""A request of at least 1.4 seconds with a `slowed` model."""


@contextmanager
def slowed(model: Model, seconds: float = 0.003) -> Iterator[None]:
    """Slow down the engine's forward passes, to leave time for faults."""
    engine: Any = model.engine
    step, outer = engine.step, vars(engine).get("step")

    def slowly(work: Any) -> Any:
        time.sleep(seconds)
        return step(work)

    engine.step = slowly
    try:
        yield
    finally:
        if outer is None:
            del engine.step  # or it would hide patches of the class by other tests
        else:
            engine.step = outer


class OtherClients:
    """Two clients that repeat the same requests."""

    def __init__(self, model: Model) -> None:
        """Record their responses alone, from a model whose cache is empty."""
        self._slots = model.engine.free_slots
        self.expected = []
        for body in ASKED:
            options: Any = {name: value for name, value in body.items() if name != "prompt"}
            result = model.generate(body["prompt"], raw=True, drafter="none", **options)
            self.expected.append(result.text)

    @contextmanager
    def unharmed(self, server: Running) -> Iterator[None]:
        """Send requests during the block; then the server must be idle with all slots free."""
        over = threading.Event()

        def ask(at: int) -> set[str]:
            texts = set[str]()
            while not (texts and over.is_set()):
                texts.add(answer(server, ASKED[at], stream=bool(at)))
            return texts

        with ThreadPoolExecutor(len(ASKED)) as pool:
            asking = [pool.submit(ask, at) for at in range(len(ASKED))]
            try:
                yield
            finally:
                over.set()
        assert [item.result() for item in asking] == [{text} for text in self.expected]
        server.rest()
        assert server.get("/health").status_code == 200
        until(lambda: counted(server) == self._slots)


def counted(server: Running) -> int:
    """Return the free slots plus those of the prefix cache."""
    entries: Any = server.scheduler.prefix_cache._entries
    engine = server.model.engine
    return engine.free_slots + engine.freed_by([entry.sequence for entry in list(entries)])


def answer(server: Running, body: dict[str, Any], *, stream: bool) -> str:
    """Return the text; retry while the queue is full."""
    while (response := server.post(TEXT, {**body, "stream": stream})).status_code == 429:
        time.sleep(0.05)
    assert response.status_code == 200, response.text
    if not stream:
        return str(response.json()["choices"][0]["text"])
    lines = response.text.splitlines()  # a slow machine adds comments
    *events, end = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert end == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def fault(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Return OpenAI's error object."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    return error


def fault_of_anthropic(response: httpx.Response, status: int, kind: str) -> str:
    """The message of an error in Anthropic's form."""
    assert response.status_code == status, response.text
    reply = response.json()
    assert set(reply) == {"type", "error"}
    assert reply["type"] == "error"
    assert set(reply["error"]) == {"type", "message"}
    assert reply["error"]["type"] == kind
    return str(reply["error"]["message"])
