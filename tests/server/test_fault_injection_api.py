"""An error at every call that the endpoints with items and blocks make, one after the other.

As in `test_fault_injection.py`, a profile function counts the calls out of some files and raises at
one of them. Whatever it was, the client gets an error in its API's form, or a stream that ends with
one; the next request is served, and no request is left in the scheduler.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import paceline.server
from paceline.runtime.model import Model
from runtime.batching.test_fault_injection import Injected, Site, injected
from support.scripted import always, called, engine_of
from support.server import Running, running

API = Path(paceline.server.__file__).parent / "api"
FILES = {
    str(API / f"{name}.py")
    for name in (
        *("responses", "response_body", "response_items", "response_store"),
        *("messages", "messages_body", "parts"),
    )
}
OURS = str(API.parent.parent)

CALL = called("ls", {})
PARAMETERS = {"type": "object", "additionalProperties": False}
TURN = {"role": "user", "content": "a"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": [
            TURN,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]},
            {"type": "function_call", "call_id": "c", "name": "ls"},
            {"type": "function_call_output", "call_id": "c", "output": "d"},
        ],
        "tools": [{"type": "function", "name": "ls", "parameters": PARAMETERS}],
    },
    "/v1/messages": {
        "max_tokens": 100,
        "messages": [
            TURN,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "ls"}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
        ],
        "tools": [{"name": "ls", "input_schema": PARAMETERS}],
    },
}


class Injector:
    """Raises at call number `at` out of the files."""

    def __init__(self) -> None:
        """Count only."""
        self.at: int | None = None
        self.count = 0
        self.seen: dict[Site, int] = {}
        """A call -> the number of its first time."""

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or caller.f_code.co_filename not in FILES:
            return
        called = frame.f_code
        if not called.co_filename.startswith(OURS) or called.co_name in ("<genexpr>", "<lambda>"):
            return
        self.count += 1
        site = (caller.f_code.co_qualname, caller.f_lineno, called.co_qualname)
        self.seen.setdefault(site, self.count)
        if self.count == self.at:
            raise Injected(f"{site}")


@pytest.fixture(scope="module")
def injector() -> Injector:
    return Injector()


@pytest.fixture
def server(scripted_server: Running, injector: Injector) -> Iterator[Running]:
    model: Model = scripted_server.model
    engine_of(scripted_server).rules = [always(f"<think>\nb\n</think>\n\nc\n{CALL}")]
    with injected(injector), running(model) as instance:  # its threads start here
        yield instance


def ends_well(server: Running, path: str, body: dict[str, Any]) -> bool:
    """Ask; whether the answer is whole. Otherwise there is an error in the form of the API."""
    response = server.post(path, body)
    anthropic = path == "/v1/messages"
    if response.status_code != 200:
        assert response.status_code == 500
        reply = response.json()
        kind = reply["error"]["type"]
        assert kind == ("api_error" if anthropic else "server_error")
        assert ("type" in reply) is anthropic
        return False
    if not body["stream"]:
        return True
    last = json.loads(response.text.rstrip().rpartition("\ndata: ")[2])
    return last["type"] in ("message_stop", "response.completed")


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_an_error_at_any_call_of_an_endpoint_is_an_error_of_its_request_alone(
    server: Running, injector: Injector, path: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("CRITICAL")
    known = set[Site]()
    for stream in (True, False):
        body = {**BODIES[path], "stream": stream}
        injector.at, injector.count = None, 0
        injector.seen.clear()
        assert ends_well(server, path, body)
        numbers = sorted(injector.seen[site] for site in injector.seen.keys() - known)
        known |= injector.seen.keys()
        for number in numbers:
            injector.at, injector.count = number, 0
            failed = not ends_well(server, path, body)
            raised = injector.count >= number
            injector.at = None
            assert failed or not raised
            server.rest()
        assert ends_well(server, path, body)
    assert len(known) > 40
