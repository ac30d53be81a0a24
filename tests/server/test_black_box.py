"""A running server as clients see it, and its end: numbered checks.

The list comes from the tests of llama.cpp, vLLM and SGLang and the complaints of their users; where
servers differ, docs/server.md describes ours.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.runtime.model import Model
from paceline.server.settings import Settings
from support.command import free_port, served
from support.other_clients import CHAT, TEXT, fault
from support.server import HTTP, Running, good, running
from support.waiting import PATIENCE, until

TURN = {"role": "user", "content": "this is the one and this is the one"}
PROMPT = "the rain in the rain in the"
PLAIN: dict[str, Any] = {"messages": [TURN], "max_tokens": 24, "temperature": 0}
BARE: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def locked(module_model: Model) -> Iterator[Running]:
    with running(module_model, Settings(api_keys=("first", "sécond"))) as instance:
        yield instance


def parts(server: Running, path: str, body: Any, *, stream: bool) -> list[Any]:
    """The response, or the chunks of the stream; `output` has a choice's message or delta."""
    response = server.events(path, body) if stream else [good(server.post(path, body)), "[DONE]"]
    assert response.pop() == "[DONE]"
    for part in response:
        for choice in part["choices"]:
            choice["output"] = choice.get("delta") or choice.get("message") or {}
    return response


def text_of(result: list[Any]) -> str:
    return "".join(c["output"].get("content", "") for part in result for c in part["choices"])


# -- 1 to 8: access and invalid requests -----------------------------------------------------------


def test_row_01_health_while_loading(tiny_gguf: Path, cache: Path):
    port = free_port()
    with served(tiny_gguf, cache, "--port", str(port)) as command:
        refused = 0
        while command.process.poll() is None:
            try:
                response = httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.ConnectError:  # the port opens after the model is loaded
                refused += 1
                time.sleep(0.02)
        assert good(response) == {"status": "ok"}
        assert refused > 0, "the port was open before the model was loaded"


def test_row_01_health_while_forward_passes_fail(model: Model, monkeypatch: pytest.MonkeyPatch):
    with running(model, Settings(api_keys=("key",))) as server:
        for path in ("/health", "/v1/health"):
            assert server.get(path).status_code == 200  # no key
        monkeypatch.setattr(server.scheduler, "_execute", None)  # a fault of ours
        headers = {"x-api-key": "key"}
        for _ in range(2):
            fault(server.post(TEXT, BARE, headers=headers), 500)
            for path in ("/health", "/v1/health"):
                assert server.get(path).status_code == 503
        monkeypatch.undo()
        assert server.post(TEXT, BARE, headers=headers).status_code == 200
        assert server.get("/health").status_code == 200
        assert server.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic first"}, 401),
        ({"x-api-key": "firs"}, 401),
        ({"authorization": "Bearer first"}, 200),
        ({"authorization": "bearer first"}, 200),
        ({"x-api-key": "first"}, 200),
        ({"x-api-key": "sécond".encode()}, 200),
    ],
)
def test_row_02_keys(locked: Running, headers: dict[str, str], status: int):
    response = locked.post(TEXT, BARE, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert fault(response, 401)["type"] == "authentication_error"
        assert locked.get("/v1/models", headers=headers).status_code == 401
        assert locked.get("/nothing", headers=headers).status_code == 401


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b'{"messages": NaN}', b"1e999"),
        *(b'{"prompt": "\xc3"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "a\n"}'),
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
    ],
)
def test_row_03_bad_json(server: Running, body: bytes):
    assert fault(server.post(CHAT, body))["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        *(("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("", 415)),
        ("application/json; charset=utf-8", 200),
    ],
)
def test_row_04_content_type(server: Running, kind: str, status: int):
    body = b'{"prompt": "a", "max_tokens": 1}'
    response = server.post(TEXT, body, headers={"content-type": kind})
    assert response.status_code == status or fault(response, status)


@pytest.mark.parametrize("chunked", [False, True])
def test_row_04_oversize(model: Model, chunked: bool):
    with running(model, Settings(body_bytes=100_000)) as server:
        body: Any = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
        if chunked:
            body = iter([body[:70_000], body[70_000:200_000]])
        headers = {"content-type": "application/json"}
        response = httpx.post(server.url + TEXT, content=body, headers=headers)
        assert fault(response, 413)["code"] == "body_too_large"
        good(server.post(TEXT, BARE))


@pytest.mark.parametrize("stream", [False, True])
def test_row_06_max_tokens_0_reads_the_prompt(server: Running, stream: bool):
    result = parts(server, CHAT, {**PLAIN, "max_tokens": 0}, stream=stream)
    assert text_of(result) == ""
    assert result[-1]["choices"][0]["finish_reason"] == "length"
    assert result[-1]["timings"]["predicted_n"] == 0 < result[-1]["timings"]["prompt_n"]


# -- 9 to 18: responses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "is_sent"),
    [({"include_usage": True}, True), ({"include_usage": False}, False), ({}, False)],
)
def test_row_09_include_usage(server: Running, options: dict[str, Any], is_sent: bool):
    result = parts(server, CHAT, {**PLAIN, "stream_options": options}, stream=True)
    received = [part for part in result if part.get("usage")]
    assert [part["choices"] for part in received] == ([[]] if is_sent else [])
    if is_sent:
        assert received == result[-1:]
        usage = received[0]["usage"]
        assert usage["completion_tokens"] == received[0]["timings"]["predicted_n"] == 24
        assert usage["total_tokens"] == usage["prompt_tokens"] + 24
        whole = good(server.post(CHAT, PLAIN))["usage"]
        assert whole.keys() == usage.keys()
        assert whole["total_tokens"] == usage["total_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_row_11_several_choices(server: Running, stream: bool, count: int):
    body = {**PLAIN, "n": count, "seed": 30, "temperature": 1, "max_tokens": 9}
    texts, reasons = [""] * count, list[int]()
    for part in parts(server, CHAT, body, stream=stream):
        for choice in part["choices"]:
            texts[choice["index"]] += choice["output"].get("content", "")
            reasons += [choice["index"]] if choice["finish_reason"] else []
    assert sorted(reasons) == list(range(count))
    for index, text in enumerate(texts):  # each is that of the seed that follows
        alone = good(server.post(CHAT, {**body, "n": 1, "seed": 30 + index}))
        assert text == alone["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_row_12_logprobs(server: Running, stream: bool):
    expected = server.model.generate([TURN], max_tokens=24, logprobs=2, drafter="none")
    result = parts(server, CHAT, {**PLAIN, "logprobs": True, "top_logprobs": 2}, stream=stream)
    received = [c["logprobs"] for part in result for c in part["choices"] if c["logprobs"]]
    entries = [entry for logprobs in received for entry in logprobs["content"]]
    assert "".join(entry["token"] for entry in entries) == text_of(result) == expected.text
    assert [entry["logprob"] for entry in entries] == [
        logprob.logprob for logprob in expected.logprobs
    ]
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)
    raw = bytes(byte for entry in entries for byte in entry["bytes"])
    assert raw.decode(errors="replace") == expected.text


def test_row_13_an_echo_with_logprobs(server: Running):
    prompts = [server.model.tokens(text, raw=True) for text in (PROMPT, "one and two", "a")]
    body = {**BARE, "prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
    for prompt, choice in zip(prompts, good(server.post(TEXT, body))["choices"], strict=True):
        received = choice["logprobs"]
        assert [len(received[name]) for name in received] == [len(prompt) + 1] * 4
        assert received["token_logprobs"][0] is None
        assert received["top_logprobs"][0] is None
        assert "".join(received["tokens"]) == choice["text"]
        assert [choice["text"][at:] for at in received["text_offset"]][-1] == received["tokens"][-1]
        expected = server.model.generate(
            prompt, max_tokens=1, logprobs=1, prompt_logprobs=True, drafter="none"
        )
        logprobs = [p and p.logprob for p in [*expected.prompt_logprobs, *expected.logprobs]]
        assert received["token_logprobs"] == logprobs
        pairs = zip(received["token_logprobs"][1:], received["top_logprobs"][1:], strict=True)
        for logprob, top in pairs:
            assert logprob in top.values()
            assert max(top.values()) >= logprob
        # Decoding was greedy.
        assert received["token_logprobs"][-1] == max(received["top_logprobs"][-1].values())


def test_row_17_prompt_formats(server: Running):
    def texts(prompt: Any) -> list[str]:
        choices = good(server.post(TEXT, {**BARE, "prompt": prompt}))["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["text"] for choice in choices]

    ids, other = (server.model.tokens(text, raw=True) for text in (PROMPT, "a"))
    (text,) = texts(PROMPT)
    assert texts(ids) == texts([PROMPT]) == texts([ids]) == [text]
    assert texts([PROMPT, "a"]) == texts([ids, other]) == texts([PROMPT, other])
    assert texts([ids, other])[0] == text


@pytest.mark.parametrize(
    "text",
    ["the rain in the rain", "né 😀 日本 👩‍🚀", " two  spaces\n", "<|im_end|>", "<tool>x", ""],
)
@pytest.mark.parametrize("field", ["prompt", "content"])
def test_row_18_tokenize_and_detokenize(server: Running, text: str, field: str):
    response = good(server.post("/tokenize", {field: text}))
    assert response["count"] == len(response["tokens"])
    again = good(server.post("/v1/detokenize", {"tokens": response["tokens"]}))
    assert again[field] == text


# -- 21: more clients than there is room for -------------------------------------------------------


def test_row_21_a_full_queue(model: Model, monkeypatch: pytest.MonkeyPatch):
    step, go_on = model.engine.step, threading.Event()
    settings = Settings(max_concurrent=1, queue=2)
    with running(model, settings) as server, ThreadPoolExecutor(3) as pool:
        load, held = server.scheduler.load, []
        expected = good(server.post(TEXT, BARE))["choices"]
        until(lambda: load.running == 0)
        monkeypatch.setattr(model.engine, "step", lambda work: go_on.wait(PATIENCE) and step(work))
        try:
            for number in range(3):
                held.append(pool.submit(server.post, TEXT, BARE))
                until(lambda n=number: (load.running, load.waiting) == (1, n))  # type: ignore[misc]
            for more in ({}, {"stream": True}, {"n": 2}):
                response = server.post(TEXT, {**BARE, **more})
                assert fault(response, 429)["code"] == "queue_full"
                assert int(response.headers["retry-after"]) >= 1
        finally:
            go_on.set()
        for entry in held:
            assert good(entry.result())["choices"] == expected


# -- 28 to 32: pages of others, the end, and the rest ----------------------------------------------


@pytest.fixture(scope="module")
def open_to_a_page(module_model: Model) -> Iterator[Running]:
    settings = Settings(api_keys=("key",), origins=("http://good.example",))
    with running(module_model, settings) as instance:
        yield instance


@pytest.mark.parametrize(("origin", "let_in"), [("good", True), ("evil", False)])
def test_row_28_cross_origin_pages(
    server: Running, open_to_a_page: Running, origin: str, let_in: bool
):
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
    closed = server.post(TEXT, BARE, headers=page_origin)
    assert "access-control-allow-origin" not in closed.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("localhost.evil", 403), ("LOCALHOST:1", 200), ("[::1]:80", 200)],
)
def test_row_28_a_disallowed_host(server: Running, host: str, status: int):
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
        body = {**BARE, "max_tokens": 200, "n": 2, "stream": True, "ignore_eos": True}
        body["speculation"] = {"drafter": "none"}
        with httpx.stream("POST", self.url + TEXT, json=body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                self.lines += [line] if line.startswith("data: ") else []
                self.begun.set()


@pytest.mark.slow
@pytest.mark.parametrize("grace", ["60", "0"])
def test_row_29_sigterm_under_load(tiny_gguf: Path, cache: Path, grace: str):
    arguments = ("--port", "0", "--shutdown-timeout", grace, "--cache-tokens", "8192")
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


def test_row_31_fields_of_other_servers_and_nulls(server: Running):
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
