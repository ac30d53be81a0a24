"""`verify --url`: servers whose texts change are found out, and ours is not one."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.cli.servers import key_for
from paceline.options import GREEDY
from paceline.runtime.model import Model
from paceline.runtime.request import Defaults
from paceline.server.settings import Settings
from paceline_lab.client import ServedModel, closed_loop
from support.server import running
from support.waiting import until

Answer = Callable[["FakeServer", dict[str, Any]], str]
TEXT = "the same text as ever"
AS_SERVED = [f"as served, {name}" for name in ("alone", "cached prefix", "3 at once")]
SILENCE = "-"
"""Sent as an answer without a text."""

END = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'


class FakeServer(ThreadingHTTPServer):
    """Answers chat completions with `answer`; knows how many requests there are, and were."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.lock = threading.Lock()
        self.open = self.asked = 0
        self.key: str | None = None
        self.locked = False
        """Whether answers need a key that models do not."""
        self.reason = b"<html>\n<h1>no such model</h1>\n</html>\n"
        """Sent with the status of a request that fails."""
        self.stream: str | None = None
        """Sent in place of the usual events."""
        self.models = {"fake"}
        """Names of models, which are listed."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.send(401, b"{}")
        else:
            self.send(
                200, json.dumps({"data": [{"id": name} for name in self.server.models]}).encode()
            )

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] in server.models or server.models == {"fake"}
        with server.lock:
            server.open += 1
            server.asked += 1
        try:
            text = server.answer(server, body)
        finally:
            with server.lock:
                server.open -= 1
        if server.locked:
            self.send(401, b"no")
            return
        if not text:
            self.send(404, server.reason)
            return
        if server.stream is not None:
            self.send(200, server.stream.encode())
            return
        content = "" if text == SILENCE else text
        events = (
            {"choices": [{"delta": {"content": content}}]},
            {"usage": {"completion_tokens": 4}},
        )
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self.send(200, f"{lines}data: [DONE]\n\n".encode())

    def send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(answer: Answer) -> Iterator[FakeServer]:
    with FakeServer(answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{n}", "kind": f"k{n // 3}", "prompt": f"say {n}"} for n in range(6)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


class Found:
    """What the command printed, and its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str], prompts: Path) -> None:
        self._capsys, self._prompts = capsys, prompts

    def __call__(self, url: str, *options: str) -> tuple[int, dict[str, Any]]:
        words = ["verify", "--url", url, "--suite", str(self._prompts), "--json", "--quiet"]
        for option, value in (("--clients", "3"), ("--max-tokens", "8")):
            words += [] if option in options else [option, value]
        code = main([*words, *options])
        return code, json.loads(self._capsys.readouterr().out)


def counts(found: dict[str, Any], name: str) -> dict[str, int]:
    """The counts of one kind, by condition."""
    return {condition: each[name] for condition, each in found["conditions"].items()}


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], prompts: Path) -> Found:
    return Found(capsys, prompts)


def test_a_deterministic_server_passes(verify: Found):
    with serving(lambda *_: TEXT) as server:
        code, found = verify(server.url)
        assert verify(server.url, "--quick")[1]["prompts"] == 2
    assert (code, found["exact"], found["changed"], found["failed"]) == (0, True, [], [])
    assert counts(found, "texts") == dict.fromkeys(AS_SERVED, 12)
    assert {*counts(found, "changed").values(), *counts(found, "failed").values()} == {0}
    assert server.asked == (6 + 2 * 4 * 6 + 3 + 3) + (2 + 6 + 3 + 2 + 3)


def test_outputs_that_change_under_load_are_located(verify: Found):
    def answer(server: FakeServer, _: dict[str, Any]) -> str:
        if server.asked <= 24:  # the first texts, and three times as many alone
            return TEXT
        until(lambda: server.open > 1 or server.asked > 28)
        return TEXT if server.open == 1 else TEXT.replace("text", "test")

    with serving(answer) as server:
        code, found = verify(server.url, "--rounds", "1")
    assert code == 1
    changed = counts(found, "changed")
    assert (changed["as served, alone"], changed["as served, cached prefix"]) == (0, 0)
    assert changed["as served, 3 at once"] > 2
    assert found["median_place"] == {"as served": 11}
    for each in found["changed"]:
        assert each[2:] == " (as served, 3 at once): character 11: 'xt as ever', 'st as ever'"


def test_a_server_that_drafts_nothing_is_a_warning(
    tiny_model: Model, verify: Found, prompts: Path, capsys: pytest.CaptureFixture[str]
):
    with running(tiny_model, Settings(drafter="none")) as server:
        words = ["verify", "--url", f"{server.url}/v1", "--rounds", "1", "--max-tokens", "8"]
        assert main([*words, "--suite", str(prompts), "--quiet"]) == 0
    assert "warning: no draft tokens are reported" in capsys.readouterr().out


def test_our_server_changes_no_output_with_drafts_and_under_load(tiny_model: Model, verify: Found):
    with running(tiny_model) as server:
        code, found = verify(f"{server.url}/v1", "--rounds", "1", "--max-tokens", "60")
    assert (code, found["changed"], found["failed"]) == (0, [], [])
    assert set(counts(found, "texts").values()) == {6}
    for mode in ("plain", "speculation"):
        assert found["conditions"][f"{mode}, alone"]["texts"] == 6
        assert {one == other > 0 for one, other in found["probabilities"][mode].values()} == {True}
    assert found["drafted"]["plain"] == 0
    assert found["drafted"]["speculation"] > 0
    assert found["warnings"] == []


def test_outputs_are_compared_with_those_of_an_earlier_run(
    verify: Found, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompts: Path
):
    """After a restart, or with another setting: `--against` its result."""
    earlier = tmp_path / "earlier.json"
    words = ("--rounds", "0", "--output", str(earlier))
    with serving(lambda *_: TEXT) as server:
        assert main(["verify", "--url", server.url, "--suite", str(prompts), *words]) == 0
        assert server.asked == 6
    with serving(lambda *_: TEXT.replace("as ever", "again")) as server:
        options = ("--against", str(earlier), "--rounds", "1", "--max-tokens", "64")
        assert main(["verify", "--url", server.url, "--suite", str(prompts), *options]) == 1
        row = capsys.readouterr().out.splitlines()[-1]
        assert "as served | 6 of 6 | 6 of 6 | 6 of 6 | 8 of 8 | 15 | - | " in row
        options = ("--against", str(earlier), "--max-tokens", "8", "--suite", str(prompts))
        assert main(["verify", "--url", server.url, *options]) == 2
        assert "its max_tokens is 64, not 8" in capsys.readouterr().err
        content = json.loads(earlier.read_text())
        del content["texts"]["p0"]
        earlier.write_text(json.dumps(content))
        options = ("--against", str(earlier), "--max-tokens", "64", "--suite", str(prompts))
        assert main(["verify", "--url", server.url, *options]) == 2
        assert "has no output for p0" in capsys.readouterr().err


def test_a_strict_server_is_asked_again_without_a_field_that_it_refuses(verify: Found):
    def answer(server: FakeServer, body: dict[str, Any]) -> str:
        return "" if "repetition_penalty" in body else TEXT

    with serving(answer) as server:
        server.reason = b"unexpected field repetition_penalty"
        code, found = verify(server.url)
    assert (code, found["failed"]) == (0, [])


def test_a_failed_request_is_not_a_changed_output(verify: Found):
    def answer(server: FakeServer, _: dict[str, Any]) -> str:
        return "" if server.asked == 9 else TEXT

    with serving(answer) as server:
        code, found = verify(server.url)
    assert (code, found["changed"], len(found["failed"])) == (1, [], 1)
    assert found["failed"][0].startswith("p0 (as served, cached prefix): ")
    assert "status 404" in found["failed"][0]


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (
            'data: {"choices": [{"delta": {"content": "a"}}]}\n\n',
            "without a finish_reason or [DONE]",
        ),
        ('data: {"choices": [3]}\n\n', "not a chat completion chunk"),
        ("data: {\n\n", "not a chat completion chunk"),
        ('data: {"error": {"message": "no memory"}}\n\n', "no memory"),
    ],
)
def test_an_invalid_stream_is_a_failed_request(
    stream: str, reason: str, verify: Found, prompts: Path, capsys: pytest.CaptureFixture[str]
):
    def answer(server: FakeServer, _: dict[str, Any]) -> str:
        server.stream = stream if server.asked == 9 else None
        return TEXT

    with serving(answer) as server:
        code, found = verify(server.url, "--clients", "1")
        assert (code, found["changed"], len(found["failed"])) == (1, [], 1)
        assert reason in found["failed"][0]
        server.stream, server.answer = stream, lambda *_: TEXT
        assert main(["verify", "--url", server.url, "--suite", str(prompts), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert (said.count("\n"), reason in said) == (1, True)


def test_the_number_of_requests_and_their_time_are_announced(
    prompts: Path, capsys: pytest.CaptureFixture[str]
):
    words = ("--suite", str(prompts), "--clients", "3", "--max-tokens", "8", "--quick")
    with serving(lambda *_: TEXT) as server:
        assert main(["verify", "--url", server.url, *words]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"{server.asked} requests, of at most 8 tokens each"
    assert [line for line in said if line.startswith("about 0.0 min more")] == said[2:3]


def test_reasoning_is_part_of_the_compared_output(verify: Found):
    def answer(server: FakeServer, _: dict[str, Any]) -> str:
        thought = "two" if server.asked == 9 else "one"
        delta = {"reasoning_content": thought, "content": "a"}
        event = {"error": None, "choices": [{"delta": delta}]}
        server.stream = f"data: {json.dumps(event)}\n\n{END}"
        return TEXT

    with serving(answer) as server:
        code, found = verify(server.url, "--clients", "1")
    assert code == 1
    assert found["changed"] == ["p0 (as served, cached prefix): character 0: 'onea', 'twoa'"]


def test_the_environments_api_key_is_only_for_local_servers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    for url in ("http://127.0.0.1:8000/v1", "http://localhost/v1", "http://[::1]:1/v1"):
        assert key_for(url, None) == "secret"
    for url in (
        *("http://other.example/v1", "http://127.0.0.1@other.example/v1", "http://10.0.0.1/v1"),
        *("http://localhost.other.example/v1", "http://2130706433/v1", "nothing"),
    ):
        assert key_for(url, None) is None, url
        assert key_for(url, "own") == "own"


@pytest.mark.parametrize(
    ("server_has", "words", "reason"),
    [
        (
            {"answer": lambda *_: ""},
            ["--served-model", "other"],
            "does not answer for the model other: status 404: <html> <h1>no such",
        ),
        ({"models": {"one", "two"}}, [], "several models; name one with --served-model, as "),
        ({}, ["--url", "http://["], "http://["),
        ({"locked": True}, [], "status 401: no; give another API key with --api-key"),
        ({"key": "secret"}, [], "requires another API key; give it with --api-key"),
        ({}, ["--url", "http://127.0.0.1:1/v1"], "no server listens at http://127.0.0.1:1/v1"),
        ({"answer": lambda *_: SILENCE}, [], "no text to compare"),
    ],
)
def test_verify_url_errors_are_one_line(
    server_has: dict[str, Any],
    words: list[str],
    reason: str,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
):
    with serving(lambda *_: TEXT) as server:
        vars(server).update(server_has)
        url = [] if "--url" in words else ["--url", server.url]
        assert main(["verify", *url, "--suite", str(prompts), "--quiet", *words]) == 2
    said = capsys.readouterr()
    assert reason in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


def test_requests_are_greedy_regardless_of_the_servers_defaults(tiny_model: Model):
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    hot = Defaults(registry={"temperature": 0.9, **dict.fromkeys(penalties, 1.7)})
    messages = [{"role": "user", "content": "the rain"}]
    with running(Model(tiny_model.files, tiny_model.engine, defaults=hot)) as other:
        endpoint = ServedModel(f"{other.url}/v1", "tiny", max_tokens=20)
        (sample,) = closed_loop(endpoint, [("p", messages)], clients=1, requests=1)
    expected = tiny_model.generate(messages, max_tokens=20, drafter="none", **GREEDY)
    assert (sample.error, sample.text, sample.tokens) == (None, expected.text, 20)
    assert sample.prompt_tokens == expected.prompt_tokens
    assert sample.first is not None
    assert 0 < sample.first <= sample.seconds


@pytest.mark.parametrize("clients", [1, 3])
def test_each_client_sends_its_next_request_after_a_response_ends(clients: int):
    most = 0

    def answer(server: FakeServer, _: dict[str, Any]) -> str:
        nonlocal most
        most = max(most, server.open)
        if clients > 1:
            until(lambda: server.open == clients or server.asked > 3)
        return TEXT

    prompts = [(f"p{n}", list[Any]()) for n in range(3)]
    ended: list[int] = []
    with serving(answer) as server:
        endpoint = ServedModel(server.url, "fake")
        samples = closed_loop(endpoint, prompts, clients=clients, requests=7, watch=ended.append)
    assert sorted(s.prompt for s in samples) == ["p0", "p0", "p0", "p1", "p1", "p2", "p2"]
    assert (ended, most) == ([*range(1, 8)], clients)
