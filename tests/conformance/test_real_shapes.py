"""Models in the published shapes of known.json: exact in both engines, and right.

Head counts, widths, windows, scaled positions and the vocabularies of `QUICK` are the published
ones; the weights are random, and of the layers there are as many as have every kind once. Tiny
models have hidden faults of such shapes.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from paceline.decoding.generation import Generation
from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Block, Counters
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine, KVSequence
from paceline.engines.llamacpp.libraries import VARIABLE
from paceline.errors import ModelError
from paceline.models.names import known_models
from support.divergence import divergence
from support.drafters import Oracle
from support.driver import generation, run, total
from support.errors import raises
from support.llamacpp import library
from support.real_shapes import (
    SHAPES,
    Shaped,
    model_of,
    shaped,
    some_text,
    some_tokens,
    write_shaped,
)

pytest.importorskip("ik_llama_cpp")
pytestmark = pytest.mark.timeout(900)  # the largest are read at a length past their window

QUICK = ("qwen3-0.6b", "qwen3.5-0.8b")
VOCAB = 16_384
"""Tokens of the others: with 262,144 a row's head takes longer than all of its layers."""
HUGE = "gpt-oss-20b"
"""OpenVINO unpacks its experts: 32 bits for each of 4, so that two layers take 15 GB."""
REFUSED = {
    "qwen3.5": "the family 'qwen35'",
    "lfm2.5": "the family 'lfm2'",
    "llama-3.2": "rope_freqs.weight",
    "phi-4": "output.weight",
}
"""Starts of names -> why ik_llama.cpp refuses them, which the plain install has."""
HYBRIDS = ("qwen3.5", "lfm2.5")
WINDOWS = {"gemma-3-1b": 512, "gemma-3-4b": 1024, HUGE: 128}
CONTEXT = 2048
COMPARED = 32
"""Rows of logits."""
RIGHT = 5e-4
"""KL divergence of a row, at most; rounded activations make up to 2.3e-4 (2026-11-25)."""
NEW = 8
WRONG = (3,)
"""Tokens of a draft that are wrong."""
ENGINES = ("openvino", "llamacpp")

shape = pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=() if name in QUICK else (pytest.mark.reference, pytest.mark.slow))
        for name in SHAPES
    ],
    indirect=True,
    scope="module",
)


def refusal_of(name: str) -> str | None:
    """Why the engine llamacpp does not run a model."""
    return next((reason for start, reason in REFUSED.items() if name.startswith(start)), None)


def engines_of(name: str) -> list[str]:
    """The engines that run a model."""
    refused = {"openvino": name == HUGE, "llamacpp": refusal_of(name) is not None}
    return [engine for engine in ENGINES if not refused[engine]]


class Results(NamedTuple):
    """What an engine computed."""

    logits: np.ndarray
    """[COMPARED, vocab]: the last rows of the text."""
    plain: list[list[int]]
    """Its answers."""
    drafted: list[list[int]]
    """The same, of answers in one call, with drafts that are right in part."""
    counters: Counters


class Model:
    """A model and its file, and what the engines made of it, each opened once."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.shaped = shaped(name, folder, None if name in QUICK else VOCAB)
        self.tokens = some_tokens(self.shaped.config["vocab_size"], 512)
        self.text = some_text(self.tokens, WINDOWS.get(name, 0) + COMPARED + 40)
        self.path = write_shaped(self.shaped, folder / f"{name}.gguf")
        self._results: dict[str, Results] = {}

    def results(self) -> dict[str, Results]:
        """Of each engine that runs it."""
        for name in engines_of(self.name):
            if name not in self._results:
                engine = opened(name, self.path)
                self._results[name] = results(engine, self.text)
                getattr(engine, "close", lambda: None)()
        return self._results


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    if request.param not in QUICK:
        pytest.importorskip("transformers", reason="minutes of large shapes, for the marked stage")
    built = Model(request.param, tmp_path_factory.mktemp("shape"))
    yield built
    built.path.unlink()


def opened(name: str, path: Path) -> Engine:
    settings = EngineSettings(cache_tokens=3 * CONTEXT, threads=1 if name == "llamacpp" else None)
    return open_engine(name, path, CONTEXT, settings)


def results(engine: Engine, text: list[int]) -> Results:
    """Of a greedy answer to a part of the text, and a seeded one to all of it.

    The text is read once, and the answers share its keys and values: reading takes longest.
    """
    work = [(text[:70], Sampling()), (text, Sampling(temperature=0.8, top_p=0.95, seed=5))]
    with closing(engine.open()) as read:
        rows = logits(engine, text, read)
        plain = [one for item in work for one in answers(engine, read, [item], [None])]
        oracles = [
            Oracle([*prompt, *one.answer], {len(prompt) + at for at in WRONG})
            for (prompt, _), one in zip(work, plain, strict=True)
        ]
        drafted = answers(engine, read, work, oracles)
    tokens = [one.answer for one in plain]
    return Results(rows, tokens, [one.answer for one in drafted], total(drafted))


def answers(
    engine: Engine,
    read: KVSequence,
    work: Sequence[tuple[list[int], Sampling]],
    oracles: Sequence[Oracle | None],
) -> list[Generation]:
    """To prompts that begin as `read` does, together; without an oracle, plainly."""
    sequences = [read.fork(len(prompt) - 1) for prompt, _ in work]
    generations = [
        generation(
            engine,
            prompt,
            sampling=sampling,
            stopping=Stopping(max_tokens=NEW),
            drafters=[oracle] if oracle else [],
            policy=Fixed(8),
            cached=sequence.length,
        )
        for (prompt, sampling), oracle, sequence in zip(work, oracles, sequences, strict=True)
    ]
    run(engine, generations, sequences=sequences)
    return generations


def logits(engine: Engine, text: list[int], sequence: KVSequence) -> np.ndarray:
    """[COMPARED, vocab]: the last rows of a text, read in chunks of 64."""
    rows = []
    for begin in range(0, len(text), 64):
        chunk = text[begin : begin + 64]
        compared = begin + len(chunk) - (len(text) - COMPARED)
        block = Block(chunk, min(max(compared, 0), len(chunk)), prefill=True)
        rows.append(engine.step([(sequence, block)]).logits[0].copy())
        sequence.commit(len(chunk))
    return np.concatenate(rows)[-COMPARED:]


@shape
def test_drafts_change_nothing(model: Model):
    for name, results in model.results().items():
        assert results.drafted == results.plain, name
        counters = results.counters
        assert NEW < counters.accepted < counters.drafted, name


@shape
def test_both_engines_compute_the_same(model: Model):
    results = model.results()
    if len(results) < len(ENGINES):
        pytest.skip(f"one engine alone runs {model.name}")
    assert divergence(*(result.logits for result in results.values())) < RIGHT


@shape
def test_what_ik_llama_cpp_cannot_run_is_refused_with_the_reason(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    refusal = refusal_of(model.name)
    if refusal is None:
        pytest.skip(f"it runs {model.name}")
    monkeypatch.setenv(VARIABLE, "ik_llama.cpp")
    with raises(ModelError, refusal, "use --engine openvino"):
        opened("llamacpp", model.path)


@shape
def test_recurrent_layers_are_exact_and_right_in_llama_cpp(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    if not model.name.startswith(HYBRIDS):
        pytest.skip(f"{model.name} has none")
    monkeypatch.setenv(VARIABLE, library("llama.cpp").name)
    result = results(opened("llamacpp", model.path), model.text)
    assert result.drafted == result.plain
    assert NEW < result.counters.accepted < result.counters.drafted
    assert divergence(model.results()["openvino"].logits, result.logits) < RIGHT


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-0.6b",
        *(pytest.param(name, marks=pytest.mark.reference) for name in ("gemma-3-1b", "smollm3-3b")),
    ],
)
def test_weights_in_q4_k_m_compute_the_same_in_both_engines(name: str, tmp_path: Path):
    """The form that people have. OpenVINO rounds the offsets of its groups to whole numbers."""
    if name not in QUICK:
        pytest.importorskip("transformers", reason="minutes of large shapes, for the marked stage")
    built = shaped(name, tmp_path, None if name in QUICK else VOCAB)
    path = write_shaped(built, tmp_path / "m.gguf", "Q4_K_M")
    text = some_text(some_tokens(built.config["vocab_size"], 512), COMPARED + 40)
    engines = (opened(name, path) for name in ENGINES)
    assert divergence(*(logits(engine, text, engine.open()) for engine in engines)) < 0.01


@pytest.mark.reference
def test_experts_in_mxfp4_compute_the_same_in_both_engines(tmp_path: Path):
    """A quarter of gpt-oss 20B's experts, and a small vocabulary: what fits memory unpacked."""
    pytest.importorskip("transformers", reason="half a minute, for the marked stage")
    config = {**SHAPES[HUGE]["config"], "num_hidden_layers": 2}
    path = write_shaped(
        model_of({**config, "num_local_experts": 8, "vocab_size": 4096}, tmp_path),
        tmp_path / "m.gguf",
    )
    text = some_text(range(4096), WINDOWS[HUGE] + COMPARED)
    engines = (opened(name, path) for name in ENGINES)
    assert divergence(*(logits(engine, text, engine.open()) for engine in engines)) < RIGHT


@pytest.mark.reference
@shape
def test_logits_are_those_of_transformers(model: Model):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if model.name == HUGE:
        pytest.skip("its experts take 7 GB in float32")
    try:
        expected = transformers_logits(model.shaped, model.tokens, model.text)
    except (KeyError, ValueError) as error:
        pytest.skip(f"this transformers has no {model.shaped.config['model_type']}: {error}")
    apart = {
        name: divergence(expected, results.logits[:, model.tokens])
        for name, results in model.results().items()
    }
    assert apart
    assert {name: value for name, value in apart.items() if value > RIGHT} == {}


def transformers_logits(built: Shaped, tokens: list[int], text: list[int]) -> np.ndarray:
    """[COMPARED, tokens]: as if the vocabulary were `tokens` alone, which have the file's rows."""
    import torch
    import transformers

    values = {**built.config, "vocab_size": len(tokens), "pad_token_id": 0}
    values |= {"bos_token_id": 1, "eos_token_id": 2}
    rope = values.get("rope_scaling") or {}
    if rope.get("type") == "longrope":  # here the context decides, there the text's length
        values["rope_scaling"] = {**rope, "short_factor": rope["long_factor"]}
    config = transformers.AutoConfig.for_model(**values)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    parameters = dict(reference.named_parameters())
    assert parameters.keys() == built.weights.shapes.keys()
    for name, parameter in parameters.items():
        table = name in ("model.embed_tokens.weight", "lm_head.weight")
        rows = built.weights.floats(name, np.array(tokens) if table else slice(None))
        parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(rows)))
    places = {token: place for place, token in enumerate(tokens)}
    with torch.no_grad():
        ids = torch.tensor([[places[token] for token in text]])
        return reference(ids, logits_to_keep=COMPARED).logits[0].numpy()


def test_known_models_say_in_which_engines_their_shapes_run():
    for name, known in known_models().items():
        assert known.ran == "shape", "a file that is run has tests of its own"
        assert {*known.engines} == {*engines_of(name)}


def test_the_shapes_are_those_of_the_models_with_a_short_name(tmp_path: Path):
    """Their numbers of weights give the sizes of the published files."""
    assert SHAPES.keys() == known_models().keys()
    bits = {}
    for name, known in known_models().items():
        outputs = model_of(SHAPES[name]["config"], tmp_path / name).plan.outputs
        bits[name] = 8 * known.bytes / sum(prod(output.shape) for output, _ in outputs)
    assert 8.5 < bits.pop("qwen3-0.6b") < 8.7  # Q8_0, and the tokenizer
    assert 4.25 < bits.pop(HUGE) < 4.75  # MXFP4, and the rest in 8 bits
    assert {name: value for name, value in bits.items() if not 4.6 < value < 6.5} == {}  # Q4_K_M
