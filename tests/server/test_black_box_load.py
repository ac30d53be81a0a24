"""What several clients see of a running server, and what it does under load and at its end: the
second half of the checks in `test_black_box.py`.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.runtime.model import Model
from paceline.server.settings import Settings
from support.command import served
from support.others import CHAT, TEXT
from support.server import HTTP, Running, running
from support.waiting import PATIENCE

pytestmark = pytest.mark.slow

PROMPT = "th is is all that it is"
BARE: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {**BARE, "max_tokens": 450, "speculation": {"drafter": "none"}}
"""4.5 seconds at least with `slow_model`."""


def good(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


# -- 28 to 32: pages of others, the end, and the rest ----------------------------------------------


@pytest.fixture(scope="module")
def open_to_a_page(module_model: Model) -> Iterator[Running]:
    settings = Settings(api_keys=("key",), origins=("http://good.example",))
    with running(module_model, settings) as instance:
        yield instance


@pytest.mark.parametrize(("origin", "let_in"), [("good", True), ("evil", False)])
def test_row_28_pages_of_other_origins(open_to_a_page: Running, origin: str, let_in: bool):
    page_origin = {"origin": f"http://{origin}.example"}
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    preflight = httpx.options(open_to_a_page.url + TEXT, headers={**page_origin, **ask})
    answered = open_to_a_page.post(TEXT, BARE, headers={**page_origin, "x-api-key": "key"})
    for response in (preflight, answered):
        allowed = response.headers.get("access-control-allow-origin")
        assert allowed == (page_origin["origin"] if let_in else None)


def test_row_28_no_page_unless_asked_for(server: Running):
    response = server.post(TEXT, BARE, headers={"origin": "http://any.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("localhost.evil", 403), ("LOCALHOST:1", 200), ("[::1]:80", 200)],
)
def test_row_28_a_host_that_is_not_allowed(server: Running, host: str, status: int):
    assert server.get("/v1/models", headers={"host": host}).status_code == status


class Reader(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.url = url
        self.start()

    def run(self) -> None:
        body = {**LONG, "max_tokens": 200, "n": 2, "stream": True}
        with httpx.stream("POST", self.url + TEXT, json=body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                self.lines += [line] if line.startswith("data: ") else []
                self.begun.set()


@pytest.mark.parametrize("grace", ["60", "0"])
def test_row_29_sigterm_under_load(tiny_gguf: Path, cache: Path, grace: str):
    arguments = ("--port", "0", "--grace", grace, "--cache-tokens", "8192")
    with served(tiny_gguf, cache, *arguments) as command:
        readers = [Reader(command.url) for _ in range(4)]
        assert all(reader.begun.wait(PATIENCE) for reader in readers)
        command.process.send_signal(signal.SIGTERM)
        if grace != "0":
            while (response := HTTP.post(command.url + TEXT, json=BARE)).status_code == 200:
                pass
            assert response.status_code == 503
            assert response.headers["retry-after"]
        for reader in readers:
            reader.join(PATIENCE)
            assert reader.lines[-1] == "data: [DONE]"
        assert command.end() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(command.url + "/health")
        with pytest.raises(ProcessLookupError):
            os.killpg(command.process.pid, 0)  # it has left no children either
    for reader in readers:
        whole = sum('"finish_reason":"length"' in line for line in reader.lines)
        refused = '"code":"draining"' in reader.lines[-2]
        # Without grace an answer may have come to its end just before.
        assert whole == 2 or (refused and grace == "0")
    assert "Traceback" not in command.said


def test_row_30_an_unknown_model(model: Model):
    with running(model, Settings(name="mine/tiny", aliases=("gpt-4o",))) as server:
        assert server.get("/v1/models/mine/tiny").json()["id"] == "mine/tiny"
        reply = good(server.post(TEXT, {**BARE, "model": "gpt-4o"}))
        assert reply["model"] == "mine/tiny"
        turns = {"messages": [{"role": "user", "content": "a"}]}
        prompts = {CHAT: turns, TEXT: {"prompt": "a"}, "/v1/responses": {"input": "a"}}
        for path, body in {**prompts, "/v1/messages": {**turns, "max_tokens": 1}}.items():
            response = server.post(path, {**body, "model": "tiny"})
            assert response.status_code == 404
            error = response.json()["error"]
            assert error.get("code", error["type"]) in ("model_not_found", "not_found_error")
        assert server.get("/v1/models/tiny").status_code == 404


def test_row_31_fields_of_others_and_nulls(server: Running):
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "temperature": 0}
    expected = good(server.post(CHAT, chat))["choices"]
    nothing = dict.fromkeys(
        (
            *("stop", "seed", "n", "tools", "tool_choice", "response_format", "logprobs", "stream"),
            *("top_logprobs", "stream_options", "logit_bias", "prediction", "speculation", "user"),
            *("top_p", "max_completion_tokens", "return_token_ids", "functions", "cache_salt"),
        )
    )
    more = {"service_tier": "auto", "store": True, "metadata": {"a": "b"}, "xtc_probability": 0}
    assert good(server.post(CHAT, {**chat, **nothing, **more}))["choices"] == expected
    ours = {"min_tokens": 9, "return_token_ids": True, "cache_prompt": False}
    (choice,) = good(server.post(CHAT, {**chat, **ours}))["choices"]
    assert len(choice["token_ids"]) == 9
