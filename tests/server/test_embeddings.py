"""POST /v1/embeddings with tiny embedding models, against a direct computation."""

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import paceline
from paceline.engines.llamacpp.engine import LlamaCppEngine
from support.server import Running, good, running
from support.tiny import reference_hidden, write_tiny

POOLINGS = {"mean": 1, "first": 2, "last": 3}
TEXTS = ["the rain in the one", "a", "this is the assistant and that is the other one " * 6]
END = 2


def path_of(folder: Path, pooling: int | None, *, end: bool, **more: Any) -> Path:
    fields = {"qwen3.pooling_type": pooling, "tokenizer.ggml.add_eos_token": end, **more}
    return write_tiny(folder / "embedder.gguf", "qwen3", fields=fields)


@pytest.fixture(scope="module", params=POOLINGS)
def embedder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server of a pooling; that of the last token ends texts with one of its own."""
    pooling, folder = request.param, tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        path = path_of(folder, POOLINGS[pooling], end=pooling == "last")
        with running(paceline.load(path, cache_tokens=2048, embeddings=True)) as instance:
            yield instance


of_the_last = pytest.mark.parametrize("embedder", ["last"], indirect=True, scope="module")


def vectors(server: Running, values: Any, **more: Any) -> np.ndarray:
    """Return the [texts, d] embeddings of a successful request."""
    data = good(server.post("/v1/embeddings", {"input": values, **more}))["data"]
    assert [item["index"] for item in data] == [*range(len(data))]
    return np.array([item["embedding"] for item in data], np.float32)


def expected(server: Running, text: str) -> np.ndarray:
    """[d], computed plainly, in float64."""
    files = server.model.files
    tokens = server.model.tokens(text, raw=True)
    pooling = files.facts.pooling
    rows = reference_hidden(files.path, tokens + [END] * (pooling == "last"))
    pooled = {"mean": rows.mean(0), "first": rows[0], "last": rows[-1]}[str(pooling)]
    return np.asarray(pooled / np.linalg.norm(pooled))


def test_embeddings_match_a_direct_computation(embedder: Running):
    rows = vectors(embedder, TEXTS)
    for vector, text in zip(rows, TEXTS, strict=True):
        np.testing.assert_allclose(vector, expected(embedder, text), atol=2e-3)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1.0, abs=1e-6)


def test_an_embedding_is_bit_identical_alone_and_under_load(embedder: Running):
    alone = [vectors(embedder, text)[0] for text in TEXTS]
    many = TEXTS * 8

    def answer() -> str:
        body = {"prompt": TEXTS[0], "max_tokens": 30, "temperature": 0}
        text: str = embedder.post("/v1/completions", body).json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(3) as pool:
        crowd = pool.submit(vectors, embedder, many)
        answers = [pool.submit(answer) for _ in range(2)]
        for place, vector in enumerate(crowd.result()):
            assert vector.tobytes() == alone[place % len(TEXTS)].tobytes(), f"text {place}"
    assert {result.result() for result in answers} == {answer()}, "responses next to embeddings"


@of_the_last
def test_the_openai_client_reads_base64_embeddings(embedder: Running):
    response = embedder.openai.embeddings.create(model="embedder", input=TEXTS)
    plain = vectors(embedder, TEXTS)
    for item, vector in zip(response.data, plain, strict=True):
        np.testing.assert_array_equal(np.array(item.embedding, np.float32), vector)
    counts = [len(embedder.model.tokens(text, raw=True)) + 1 for text in TEXTS]
    assert response.usage.prompt_tokens == response.usage.total_tokens == sum(counts)
    body = {"input": "a", "encoding_format": "base64"}
    encoded = embedder.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tobytes() == plain[1].tobytes()


@of_the_last
def test_fewer_dimensions_are_the_first_ones_normalized_to_length_1(embedder: Running):
    (whole,), (short,) = vectors(embedder, "a"), vectors(embedder, "a", dimensions=16)
    np.testing.assert_allclose(short, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)


@of_the_last
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "input"),
        ({"input": ["a", ""]}, "empty"),
        ({"input": [1, -1]}, "input: the prompt has the token id -1"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a " * 600}, "context"),
        ({"input": "a", "dimensions": 65}, "dimensions: is 65, and the model's vectors have 64"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_embedding_request_is_rejected_by_name(embedder: Running, body: Any, named: str):
    response = embedder.post("/v1/embeddings", body)
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]["message"]
    embedder.rest()


@of_the_last
def test_a_client_that_disconnects_ends_its_embeddings(
    embedder: Running, monkeypatch: pytest.MonkeyPatch
):
    embedder.rest()
    free = embedder.model.engine.free_slots
    started, step = threading.Event(), LlamaCppEngine.step
    left = threading.Event()
    calls = []

    def waits(self: Any, work: Any) -> Any:
        calls.append(len(work))
        started.set()
        assert left.wait(20)
        return step(self, work)

    monkeypatch.setattr(LlamaCppEngine, "step", waits)

    def leave() -> None:
        with pytest.raises(httpx.TimeoutException):
            embedder.post("/v1/embeddings", {"input": ["a"] * 500}, timeout=2.0)
        left.set()

    client = threading.Thread(target=leave)
    client.start()
    assert started.wait(20)
    client.join()
    embedder.rest()
    assert sum(calls) < 100, "of 500 texts"
    assert embedder.model.engine.free_slots == free


@of_the_last
def test_embedded_texts_are_counted(embedder: Running):
    def counted(name: str) -> float:
        lines = embedder.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith(f"paceline_{name}_total ")]
        return float(line.split()[-1])

    before = counted("embeddings"), counted("embedded_tokens")
    vectors(embedder, [[3, 4, 5], [6]])
    assert (counted("embeddings"), counted("embedded_tokens")) == (before[0] + 2, before[1] + 6)


@pytest.mark.parametrize(
    ("pooling", "more"),
    [(None, {}), (0, {}), (4, {}), (1, {"qwen3.attention.causal": False})],
    ids=["none named", "type none", "rank", "both directions"],
)
def test_a_model_without_pooling_returns_501(
    pooling: int | None, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    path = path_of(tmp_path, pooling, end=False, **more)
    with running(paceline.load(path, cache_tokens=512, embeddings=True)) as server:
        response = server.post("/v1/embeddings", {"input": "a"})
        assert response.status_code == 501
        error = response.json()["error"]
        assert error["code"] == "not_implemented"
        assert "embedder makes no embeddings" in error["message"]
