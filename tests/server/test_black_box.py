"""A running server as one client sees it: the first half of 32 numbered checks, of which
`test_black_box_load.py` has the second. The list comes from the tests of llama.cpp, vLLM and SGLang
and the complaints of their users; where servers differ, docs/server.md has the behaviour of ours.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.runtime.model import Model
from paceline.server.settings import Settings
from support.command import free_port, served
from support.others import CHAT, TEXT, fault
from support.server import Running, running

TURN = {"role": "user", "content": "this is the one and this is the one"}
PROMPT = "the rain in the rain in the"
PLAIN: dict[str, Any] = {"messages": [TURN], "max_tokens": 24, "temperature": 0}
BARE: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def locked(module_model: Model) -> Iterator[Running]:
    with running(module_model, Settings(api_keys=("first", "sécond"))) as instance:
        yield instance


def good(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


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


def test_row_01_health_while_no_call_succeeds(model: Model, monkeypatch: pytest.MonkeyPatch):
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


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_row_04_wrong_content_type(server: Running, kind: str):
    fault(server.post(TEXT, b'{"prompt": "a"}', headers={"content-type": kind}), 415)


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


def test_row_04_unknown_path_and_wrong_method(server: Running):
    assert fault(server.get("/v1/nothing"), 404)["code"] == "unknown_url"
    assert fault(server.get(CHAT), 405)["code"] == "method_not_allowed"
    assert fault(server.post("/v1/models"), 405)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses"])
@pytest.mark.parametrize("words", [600, 100_000])
def test_row_05_prompt_longer_than_the_context(
    server: Running, path: str, stream: bool, words: int
):
    long = "word " * words
    body: dict[str, Any] = {TEXT: {"prompt": long}, "/v1/responses": {"input": long}}.get(
        path, {"messages": [{"role": "user", "content": long}]}
    )
    error = fault(server.post(path, {**body, "stream": stream}))
    assert error["code"] == "context_length_exceeded"
    assert error["n_ctx"] == 512 < error["n_prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_row_06_max_tokens_0_reads_the_prompt(server: Running, stream: bool):
    result = parts(server, CHAT, {**PLAIN, "max_tokens": 0}, stream=stream)
    assert text_of(result) == ""
    assert result[-1]["choices"][0]["finish_reason"] == "length"
    assert result[-1]["timings"]["predicted_n"] == 0 < result[-1]["timings"]["prompt_n"]


# -- 9 to 18: what the answers are -----------------------------------------------------------------


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
def test_row_11_several_answers(server: Running, stream: bool, count: int):
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


def test_row_16_cached_tokens(server: Running):
    def cached(last: str) -> tuple[int, int]:
        turn = {"role": "user", "content": "one two and three " * 20 + last}
        usage = good(server.post(CHAT, {**PLAIN, "messages": [turn]}))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    block = server.model.engine.block_size  # blocks are shared as a whole
    assert cached("four")[0] < block, "the beginning of every turn"
    result, count = cached("four")
    assert count - 1 - block < result <= count - 1
    changed, count = cached("nine")
    behind = len(server.model.tokens("nine<|im_end|>\n<|im_start|>assistant\n", raw=True))
    assert count - behind - block < changed <= count - behind


def test_row_17_forms_of_a_prompt(server: Running):
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
def test_row_18_tokens_and_back(server: Running, text: str, field: str):
    response = good(server.post("/tokenize", {field: text}))
    assert response["count"] == len(response["tokens"])
    again = good(server.post("/v1/detokenize", {"tokens": response["tokens"]}))
    assert again[field] == text
