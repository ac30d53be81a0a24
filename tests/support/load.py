"""Many clients who ask a server in every way there is to ask, and what each must be told."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from paceline.constraints.grammar import Grammars
from paceline.decoding.types import FinishReason
from paceline.models.manifest import TOKENIZER
from paceline.runtime.batching import batch
from paceline.runtime.model import Model
from paceline.runtime.result import Result
from paceline.server.settings import Settings
from support.server import HTTP, Running, running
from support.waiting import PATIENCE, leaves_after

CLIENTS = 8
LEAVING = 0.12
"""How many of the clients go away before their answer has ended."""

SYSTEM = (
    "You are a careful assistant who answers in few words. Quote where you can, repeat what you "
    "were told where that helps, and never invent anything. If you do not know something, say so. "
    "Numbers are written as digits, lists have one item a line, and code stands in a block of its "
    "own."
)
QUESTIONS = [
    "Say this again, twice: the quick brown fox jumps over the lazy dog.",
    "Count from one to twenty, with commas.",
    "What is the capital of France, and on which river does it lie?",
    "Write a line each about a cat, a dog and a crow. Begin with 🐈.",
]
TEXTS = [
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
    SYSTEM + "\n\n" + SYSTEM[:150],
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 11, "top_k": 40, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 12, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0, "presence_penalty": 0.8, "frequency_penalty": 0.3, "stop": ["\n\n", "e,"]},
]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 12}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
SPECULATIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"drafter": "none"},
    {"drafter": "suffix", "policy": "fixed", "max_block": 8},
    {"drafter": "ngram:min=1", "policy": "adaptive"},
    {"drafter": "ngram", "policy": "kelly", "max_block": 4},
    {"drafter": "table", "policy": "fixed", "max_block": 3},
    {"drafter": "suffix+table+ngram:min=1", "max_block": 16},
)
CACHES: list[dict[str, Any]] = [
    *({}, {}, {"cache_prompt": False}, {"cache_salt": "one"}, {"cache_salt": "two"})
]

DRAFTERS = {"ngram", "table", "prediction"}
"""Those that must have drafted."""
PREDICTIONS = 0.15
"""How many of the requests bring a prediction."""


@dataclass(frozen=True)
class Load:
    """How much is asked of a server."""

    requests: int
    tokens: int
    """Of an answer, at most."""
    samplings: int = len(SAMPLINGS)
    """How many of them."""


@dataclass(frozen=True)
class Question:
    """What an answer depends on, and nothing else."""

    prompt: str | list[dict[str, str]]
    """A text for completions, or a chat."""
    options: Mapping[str, Any]
    form: bool = False

    def alone(self, model: Model, grammars: Grammars) -> Result:
        """The answer that nobody else is asked for."""
        return model.generate(
            self.prompt,
            raw=True,
            drafter="none",
            logprobs=2,
            constraint=grammars.json_schema(SCHEMA) if self.form else None,
            **self.options,  # type: ignore[typeddict-item]
        )


@dataclass
class Told:
    """What a client was told before it went away, or all of it."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    cached: int = 0
    accepted: int = 0
    steps: int = 0
    drafters: set[str] = field(default_factory=set)

    def take(self, choice: Mapping[str, Any], logprobs: bool) -> None:
        """A choice of a response, or of a chunk."""
        message = choice.get("message") or choice.get("delta")
        self.text += choice["text"] if message is None else message.get("content") or ""
        self.ids += choice.get("token_ids") or []
        self.reason = choice["finish_reason"]
        if logprobs and (stated := choice["logprobs"]):
            entries = stated.get("content")
            self.logprobs += (
                stated["token_logprobs"] if entries is None else [e["logprob"] for e in entries]
            )


@dataclass(frozen=True)
class Asked:
    """A question, and the way in which a client asks it."""

    question: Question
    way: Mapping[str, Any]
    patience: int | None
    """Chunks after which the client goes away; of an answer at once: at 0 it goes away at once."""

    def ask(self, server: Running) -> Told:
        """Ask, and read as long as the client is there."""
        prompt, options = self.question.prompt, dict(self.question.options)
        body = {**options, **self.way, "return_token_ids": True}
        chat = not isinstance(prompt, str)
        body["messages" if chat else "prompt"] = prompt
        if self.question.form:
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        if "logprobs" in self.way:
            body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        told = Told()
        if not body["stream"]:
            patience = PATIENCE if self.patience is None else 0.15
            try:
                response = server.post(path, body, timeout=leaves_after(patience))
            except httpx.TimeoutException:
                return told
            assert response.status_code == 200, response.text
            self._take(told, response.json())
            return told
        body["stream_options"] = {"include_usage": True}
        with HTTP.stream("POST", server.url + path, json=body) as response:
            assert response.status_code == 200, response.read()
            for number, chunk in enumerate(_chunks(response)):
                if number == self.patience:
                    break
                self._take(told, chunk)
        return told

    def _take(self, told: Told, response: Mapping[str, Any]) -> None:
        assert "error" not in response, response
        for choice in response["choices"]:
            told.take(choice, "logprobs" in self.way)
        if response.get("usage"):
            told.cached = response["usage"]["prompt_tokens_details"]["cached_tokens"]
            told.accepted = response["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
            told.steps = response["speculation"]["steps"]
            told.drafters = set(response["speculation"]["drafted_by"])


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def questions(load: Load) -> list[Question]:
    """All of them; each is asked several times."""
    asked = []
    for sampling in SAMPLINGS[: load.samplings]:
        options = {"max_tokens": load.tokens, **sampling}
        asked += [Question(text, options) for text in TEXTS]
        asked += [Question(_chat(question), options) for question in QUESTIONS]
        asked.append(Question(_chat(QUESTIONS[2]), {**options, "max_tokens": 40}, form=True))
    return asked


def _chat(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def requests(load: Load, answers: Sequence[Result]) -> Iterator[Asked]:
    """Who asks for what, in which way: drawn once, the same every time."""
    asked, drawn = questions(load), random.Random(5)
    for _ in range(load.requests):
        at = drawn.randrange(len(asked))
        way = {
            "stream": drawn.random() < 0.6,
            "speculation": drawn.choice(SPECULATIONS),
            **drawn.choice(CACHES),
        }
        if drawn.random() < 0.3:
            way["logprobs"] = True
        if drawn.random() < PREDICTIONS:
            words = answers[at].text.split(" ")
            words[len(words) // 2 : len(words) // 2] = ["indeed"]  # right but for a word
            way["prediction"] = {"type": "content", "content": " ".join(words)}
        leaves = drawn.random() < LEAVING
        yield Asked(asked[at], way, drawn.randrange(load.tokens // 2) if leaves else None)


def is_the_same(told: Told, expected: Result, ends: Sequence[int], asked: Asked) -> None:
    """A client was told what the request gets alone; one that went away, a beginning of it."""
    assert expected.text.startswith(told.text), asked
    assert told.ids == expected.token_ids[: len(told.ids)], asked
    if told.reason is None:
        assert asked.patience is not None
        return
    assert told.text == expected.text, asked
    assert told.reason == expected.finish_reason, asked
    whole = expected.token_ids
    if whole[-1] in ends:
        whole = whole[:-1]
    elif expected.finish_reason == FinishReason.STOP:  # tokens of the stop string are not told
        whole = told.ids
    assert told.ids == whole, asked
    if "logprobs" in asked.way:
        known = [logprob.logprob for logprob in expected.logprobs[: len(told.ids)]]
        assert told.logprobs == known, asked


def plain_answers(model: Model, load: Load) -> list[Result]:
    """What every question gets alone."""
    grammars = Grammars(
        model.files.folder / TOKENIZER,
        vocab_size=model.engine.vocab_size,
        stop_token_ids=model.files.stop_token_ids,
    )
    return [question.alone(model.fresh(), grammars) for question in questions(load)]


def check_load(model: Model, load: Load, answers: Sequence[Result], drafter: str = "auto") -> None:
    """Ask everything of a server, and compare what was told with the answers alone."""
    files, asked = model.files, questions(load)
    all_asked = list(requests(load, answers))
    free = model.engine.free_slots
    with (
        pytest.MonkeyPatch.context() as patch,
        running(model.fresh(), Settings(drafter=drafter)) as server,
    ):
        # A tiny model computes a row sooner than a drafter is asked.
        patch.setattr(batch, "_PLAIN_CALLS", 0)
        with ThreadPoolExecutor(CLIENTS) as clients:
            reports = list(clients.map(lambda item: item.ask(server), all_asked))
        server.rest()
        assert server.get("/health").status_code == 200
        calls = server.scheduler.load.calls
        assert server.scheduler.load.failed == 0
    assert model.engine.free_slots == free
    for told, item in zip(reports, all_asked, strict=True):
        is_the_same(told, answers[asked.index(item.question)], files.stop_token_ids, item)
    # It was a load, and what could go wrong was there to go wrong.
    whole = [told for told in reports if told.reason is not None]
    assert load.requests * (1 - 2 * LEAVING) < len(whole) < load.requests
    assert any(told.reason is None and told.text for told in reports)
    assert {told.reason for told in whole} == {"stop", "length"}
    assert sum(told.cached > 0 for told in whole) > len(whole) / 5
    assert sum(told.cached == 0 for told in whole) > len(whole) / 10
    assert sum(told.accepted for told in whole) > len(whole)
    assert calls < sum(told.steps for told in whole)
    assert set[str]().union(*(told.drafters for told in whole)) >= DRAFTERS
