"""Grammars, schemas and lists that are meant to do harm, sent to a running `paceline serve`: each
gets one clear error or a response, and other requests are served concurrently.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.command import Command, served, started
from support.server import HTTP, good
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TURN = {"role": "user", "content": "this is the one"}
SPLIT = r"((.|\n){0,99}e){99}/ & /((.|\n){0,99}t){99}(.|\n)*/ & /((.|\n){0,99}a){99}(.|\n)*"
MEETING = f"start: T\nT: /{SPLIT}/"
"""One derivative of it is larger than any memory."""
MULTIPLES = {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]}
CALLS = {"type": "object", "properties": {"n": MULTIPLES}, "required": ["n"]}


def schema(value: Any) -> dict[str, Any]:
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
    return {"response_format": wrapped}


def outputs(**values: Any) -> dict[str, Any]:
    return {"structured_outputs": values}


def tool(parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


REJECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "intersection": (CHAT, outputs(grammar=MEETING)),
    "multiples": (CHAT, schema(MULTIPLES)),
    "multiples of a completion": (TEXT, schema(MULTIPLES)),
    "multiples of a response": (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": MULTIPLES}}},
    ),
    "multiples of a message's tool": (
        "/v1/messages",
        {"tools": [{"name": "f", "input_schema": CALLS}], "tool_choice": {"type": "any"}},
    ),
    "endless reference": (CHAT, schema({"$ref": "#"})),
    "stop strings": (CHAT, {"stop": [f"{n}" for n in range(5000)]}),
    "logit_bias": (CHAT, {"logit_bias": {f"{n}": 1 for n in range(50_000)}}),
}


@pytest.fixture(scope="module")
def command(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    cache = tmp_path_factory.mktemp("cache")
    with served(tiny_gguf, cache, "--port", "0", "--shutdown-timeout", "1") as command:
        # What every process needs at first.
        good(sent(command, CHAT, {**schema({"const": 1}), "max_tokens": 4}))
        good(sent(command, CHAT, {**tool({"type": "object"}), "max_tokens": 4}))
        yield command


def sent(command: Command, path: str, more: dict[str, Any], *, raw: bool = False) -> httpx.Response:
    body = {"messages": [TURN], "max_tokens": 30, **more}
    if path == TEXT:
        body = {"prompt": "a", "max_tokens": 30, **more}
    elif path == "/v1/responses":
        body = {"input": "a", "max_output_tokens": 30, **more}
    text = json.dumps(body)
    if raw:
        text = text.replace('"structured_outputs"', r'"structured\u005foutputs"')
    headers = {"content-type": "application/json"}
    return HTTP.post(command.url + path, content=text, headers=headers)


def memory(command: Command) -> int:
    """Resident bytes of the server, and of the largest of its processes and of their children."""
    pid = command.process.pid
    others = [child for one in children(pid) for child in (one, *children(one))]
    return resident(pid) + max(map(resident, others), default=0)


def children(process: int) -> list[int]:
    try:
        path = Path(f"/proc/{process}/task/{process}/children")
        return [*map(int, path.read_text(encoding="ascii").split())]
    except (FileNotFoundError, ProcessLookupError):
        return []


def resident(process: int) -> int:
    try:
        pages = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class OtherClients:
    """Other clients of a server: their requests succeed, and it reports its health promptly."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._over = threading.Event()
        self.slowest = self.most = 0.0
        self.answers: set[str] = set()
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=work) for work in (self._check, self._ask)]

    def __enter__(self) -> "OtherClients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not self.failed

    def _check(self) -> None:
        while not self._over.is_set():
            started = time.monotonic()
            response = HTTP.get(self._command.url + "/health")
            self.slowest = max(self.slowest, time.monotonic() - started)
            self.failed += [response.text] if response.status_code != 200 else []
            self.most = max(self.most, memory(self._command))
            time.sleep(0.02)

    def _ask(self) -> None:
        forced = {**tool({"type": "object", "properties": {}, "additionalProperties": False})}
        bodies = [{}, schema({"const": "the one"}), {**forced, "tool_choice": "required"}]
        while not (self._over.is_set() and self.answers):
            for body in bodies:
                response = sent(self._command, CHAT, {**body, "temperature": 0})
                if response.status_code != 200:
                    self.failed.append(response.text)
                    return
                message = response.json()["choices"][0]["message"]
                calls = [call["function"] for call in message.get("tool_calls", ())]
                self.answers.add(json.dumps([message["content"], calls]))


@pytest.mark.parametrize(
    ("name", "raw"), [*((name, False) for name in REJECTED), ("escaped field", True)]
)
def test_a_harmful_grammar_gets_an_error_while_other_requests_are_served(
    command: Command, name: str, raw: bool
):
    path, more = REJECTED.get(name, (TEXT, outputs(grammar=MEETING.replace("99", "98"))))
    before = memory(command)
    with OtherClients(command) as others:
        deadline = time.monotonic() + PATIENCE
        seconds = 0.0
        while time.monotonic() < deadline:
            sent_at = time.monotonic()
            response = sent(command, path, more, raw=raw)
            seconds = max(seconds, time.monotonic() - sent_at)
            if response.status_code != 429:  # this machine is too busy to see it in time
                break
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert len(error["message"]) < 500
    assert "\n" not in error["message"]
    assert seconds < PATIENCE / 2
    assert others.slowest < PATIENCE / 10, "the event loop was blocked"
    assert others.most - before < 1.9e9, "a process with its limit of memory, and nothing more"
    assert len(others.answers) <= 3, "answers changed"


def test_many_harmful_grammars_neither_block_cached_ones_nor_leak_memory(command: Command):
    before = memory(command)
    statuses: list[int] = []

    def attack(number: int) -> None:
        grammar = MEETING.replace("e)", f"{chr(97 + number)})")
        statuses.append(sent(command, CHAT, outputs(grammar=grammar)).status_code)

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(12)]
    with OtherClients(command) as others:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    good(sent(command, CHAT, schema({"const": "a new one"})))
    assert set(statuses) <= {400, 429}
    assert 400 in statuses
    assert others.slowest < PATIENCE / 10
    until(lambda: memory(command) - before < 100e6)


# -- shutdown --------------------------------------------------------------------------------------

HANGS = """
import sys, time
from paceline.cli.app import main
from paceline.constraints.grammar import Grammars
from paceline.server import run
from paceline.server.api.info import InfoHandlers

def hang(*_):
    print("hangs", file=sys.stderr, flush=True)
    time.sleep(3600)

async def hang_loop(*_):
    hang()

run._LAST_SECONDS = 1
Grammars.regex = hang
InfoHandlers.model = hang_loop
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("where", "number"), [("reader", signal.SIGTERM), ("event loop", signal.SIGINT)]
)
def test_a_hanging_server_exits_after_its_shutdown_timeout(
    where: str, number: signal.Signals, tiny_gguf: Path, cache: Path
):
    options = ["serve", "--model", str(tiny_gguf), "--port", "0", "--shutdown-timeout", "0.5"]
    with started([sys.executable, "-c", HANGS, *options], cache) as command:
        url = command.url

        def ask() -> None:
            with pytest.raises(httpx.HTTPError):
                if where == "reader":
                    body = {"messages": [TURN], **outputs(regex="a")}
                    HTTP.post(url + CHAT, json=body).raise_for_status()
                else:
                    HTTP.get(f"{url}/v1/models/any").raise_for_status()

        client = threading.Thread(target=ask)
        client.start()
        until(lambda: "hangs" in command.said)
        sent_at = time.monotonic()
        command.process.send_signal(number)
        assert command.end() == 1
        assert time.monotonic() - sent_at < 0.5 + 1 + PATIENCE / 10
        assert "has not stopped within its shutdown timeout" in command.said
        client.join(PATIENCE)
