"""`Model.decide`: probabilities match a direct computation and are always bit-identical."""

import json
import math
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.decoding.types import Block
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.errors import InvalidRequest
from paceline.models import DEFAULT_MODEL, resolve
from paceline.runtime.decisions import DecisionJob, encode_questions, read_questions
from paceline.runtime.model import Model
from support.errors import raises
from support.families import write_gguf_of
from support.llamacpp import library
from support.other_clients import slowed
from support.plain import small
from support.process import COMMAND
from support.scheduling import end_scheduler
from support.thinking import TEMPLATES, write_thinking
from support.waiting import PATIENCE, until

INPUT = "the rain in the one and the other"
PREDICATE = {"type": "predicate", "instructions": "it rains"}
CHOICE = {
    "type": "choice",
    "name": "which",
    "instructions": "which one?",
    "choices": [{"value": "a"}, {"value": True, "description": "both"}, {"value": "true"}],
}
SCORE = {
    "type": "score",
    "instructions": "how wet?",
    "levels": [{"label": "dry"}, {"label": "wet", "description": "rain"}, {"label": "sea"}],
}
QUESTIONS: list[dict[str, Any]] = [PREDICATE, CHOICE, SCORE]
MANY = [{**PREDICATE, "instructions": f"number {n} of the rain"} for n in range(6)]

real = pytest.param("real", marks=[pytest.mark.real_model, pytest.mark.slow])


@pytest.fixture(params=["tiny", real])
def decider(request: pytest.FixtureRequest) -> Iterator[Model]:
    """The tiny model, and the default one."""
    model: Model = request.getfixturevalue("model" if request.param == "tiny" else "real_model")
    yield model
    end_scheduler(model)


def bits(model: Model, questions: list[Any], given: Any = INPUT) -> list[Any]:
    return [answer.probabilities for answer in model.decide(given, questions).answers]


def row_after(model: Model, prompt: list[int], label: list[int]) -> list[Any]:
    """Return logits for each token of a label and the one after it, from a fresh sequence."""

    def run() -> list[Any]:
        with closing(model.engine.open()) as sequence:
            block = Block([*prompt, *label], len(label) + 1, prefill=True)
            return [
                row.astype(np.float64) for row in model.engine.step([(sequence, block)]).logits[0]
            ]

    return model.call(run)


def test_decision_probabilities_are_the_softmax_of_the_label_logits(decider: Model):
    answers = decider.decide(INPUT, QUESTIONS).answers
    labels = [decider.tokens(letter, raw=True)[-1] for letter in "ABC"]
    for question, answer in zip(read_questions(QUESTIONS), answers, strict=True):
        chat = [{"role": "user", "content": text} for text in (INPUT, question.text("ABC"))]
        (row,) = row_after(decider, decider.tokens(chat), [])
        weights = np.exp(row[labels][: len(question.options)])
        assert answer.probabilities == pytest.approx(weights / weights.sum(), abs=1e-12)
        result = decider.generate(chat, max_tokens=1, logprobs=20, drafter="none")
        listed = dict(result.logprobs[0].top)
        for token, part in zip(labels, answer.probabilities, strict=False):
            if {token, labels[0]} <= listed.keys():
                ratio = math.exp(listed[token] - listed[labels[0]])
                assert ratio == pytest.approx(part / answer.probabilities[0], rel=1e-9)


def test_a_decision_is_bit_identical_alone_and_in_a_batch(decider: Model):
    alone = [bits(decider.without_history(), [question])[0] for question in QUESTIONS]
    assert bits(decider.without_history(), QUESTIONS) == alone
    assert bits(decider, [*MANY, *QUESTIONS, *MANY])[6:9] == alone


def test_a_decision_is_bit_identical_with_and_without_a_cached_prefix(decider: Model):
    without = decider.without_history().decide(INPUT, QUESTIONS)
    first, again = decider.decide(INPUT, QUESTIONS), decider.decide(INPUT, QUESTIONS)
    assert (without.cached_tokens, first.cached_tokens > 0) == (0, False)
    assert again.cached_tokens > 0
    assert without.answers == first.answers == again.answers
    assert without.exact
    assert again.exact


def test_a_decision_is_bit_identical_next_to_other_requests(decider: Model):
    alone = bits(decider.without_history(), QUESTIONS)
    with ThreadPoolExecutor(4) as pool:
        answer = pool.submit(decider.generate, INPUT, max_tokens=30, ignore_eos=True)
        others = [pool.submit(bits, decider, MANY, f"text {n}") for n in range(2)]
        for _ in range(2):
            assert bits(decider, QUESTIONS) == alone
        assert others[0].result() != others[1].result()
        answer.result()


@pytest.mark.parametrize("which", ["tiny", real])
def test_a_decision_is_bit_identical_after_a_restart(
    which: str, request: pytest.FixtureRequest, tiny_gguf: Path, tmp_path: Path
):
    if which == "tiny":
        request.getfixturevalue("cache")
    name = str(tiny_gguf) if which == "tiny" else DEFAULT_MODEL
    with paceline.load(name) as model:
        answers = model.decide(INPUT, QUESTIONS).answers
    (tmp_path / "questions.json").write_text(json.dumps(QUESTIONS))
    words = ["decide", "--questions", "questions.json", "-m", name, "--json"]
    text = INPUT.encode()
    done = subprocess.run([*COMMAND, *words], check=True, cwd=tmp_path, input=text, stdout=-1)
    assert json.loads(done.stdout)["answers"] == [answer.as_dict() for answer in answers]


def test_a_preempted_decision_is_bit_identical(model: Model):
    asked = encode_questions(
        model.files, INPUT, read_questions(QUESTIONS), model._request({"think": False})
    )
    decided: list[Any] = []

    def run(most: int) -> None:
        with closing(model.engine.open()) as sequence:
            job = DecisionJob(sequence, asked, decided, model.files, lambda: True)
            while not job.finished and len(decided) < most:
                block = job.next_block(7)
                job.accept(model.engine.step([(sequence, block)]), 0)
            job.close()
            assert sequence.length == len(job.tokens)

    for most in (1, 2, 3):
        model.call(lambda most=most: run(most))
    assert [one.probabilities for one in decided] == bits(model, QUESTIONS)


def test_labels_with_several_tokens_are_scored_to_the_end_of_the_turn(model: Model):
    """The tiny vocabulary has no tokens of two letters."""
    question = {**CHOICE, "choices": [{"value": f"{n}"} for n in range(27)]}
    (answer,) = model.decide("a", [question]).answers
    assert math.fsum(answer.probabilities) == pytest.approx(1.0)
    (parsed,) = read_questions([question])
    names = [*map(chr, range(65, 91)), "AA"]
    chat = [{"role": "user", "content": text} for text in ("a", parsed.text(names))]
    prompt, scores = model.tokens(chat), []
    for name in names:
        label = [model.tokens(letter, raw=True)[-1] for letter in name]
        rows = row_after(model, prompt, label)
        logs = [row - np.log(np.exp(row).sum()) for row in rows]
        ends = [*model.files.stop_token_ids]
        score = sum(log[token] for log, token in zip(logs, label, strict=False))
        scores.append(score + np.log(np.exp(logs[-1][ends]).sum()))
    weights = np.exp(np.array(scores) - max(scores))
    assert answer.probabilities == pytest.approx(weights / weights.sum(), rel=1e-9)
    assert bits(model, [*QUESTIONS, question], "a")[-1] == answer.probabilities


def test_decisions_have_the_format_of_their_questions(model: Model):
    likely, which, wet = model.decide(INPUT, QUESTIONS).answers
    assert likely.as_dict() == {
        "type": "predicate",
        "name": None,
        "probability": likely.probability,
    }
    answer = which.as_dict()
    assert [one["value"] for one in answer["probabilities"]] == ["a", True, "true"]
    assert answer["name"] == "which"
    best = max(which.probabilities)
    assert answer["choice"] is ["a", True, "true"][which.probabilities.index(best)]
    assert which.confidence == pytest.approx((best - 1 / 3) / (2 / 3))
    score = wet.as_dict()
    assert [(one["label"], one["value"]) for one in score["probabilities"]] == [
        *(("dry", 0), ("wet", 1), ("sea", 2))
    ]
    assert score["score"] == pytest.approx(wet.probabilities[1] + 2 * wet.probabilities[2])
    assert 0 <= score["confidence"] <= 1


def test_decisions_accept_chats_and_json_as_input(model: Model):
    chat = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": [1, None]}}]},
        {"role": "assistant", "content": "b"},
    ]
    text = [chat[0], {"role": "user", "content": '{"a": [1, null]}'}, chat[2]]
    assert bits(model, QUESTIONS, chat) == bits(model, QUESTIONS, text)


def test_a_reasoning_model_decides_without_reasoning(tmp_path: Path, cache: Path):
    path = write_thinking(tmp_path / "qwen.gguf", TEMPLATES["qwen3"])
    with paceline.load(path) as model:
        request = model._request({"think": False})
        (asked,) = encode_questions(model.files, INPUT, read_questions([PREDICATE]), request)
        assert model.detokenize(asked.prompt).endswith("assistant\n\n\n\n\n")
        model.decide(INPUT, [PREDICATE])
    path = write_thinking(tmp_path / "r1.gguf", TEMPLATES["deepseek-r1"])
    with paceline.load(path) as model, raises(InvalidRequest, "decisions", "cannot turn reasoning"):
        model.decide(INPUT, [PREDICATE])


def test_decisions_end_at_shutdown_and_start_no_new_scheduler(model: Any):
    with ThreadPoolExecutor(1) as pool, slowed(model, 0.02):
        scheduler = model.scheduler
        asked = pool.submit(model.decide, INPUT, MANY)
        until(lambda: scheduler.unfinished)
        started = monotonic()
        scheduler.close(grace=PATIENCE)
        assert len(asked.result().answers) == len(MANY)
        assert monotonic() - started < PATIENCE
        assert model._scheduler is scheduler


def test_recurrent_models_compute_the_decision_input_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    library("llama.cpp")
    path = write_gguf_of("lfm2", tmp_path / "lfm2.gguf")
    files = resolve(str(path), cache)
    with small(files, 2048) as model:
        text, rows = "a " * 120, list[int]()
        questions = [{**one, "instructions": one["instructions"] + " c" * 120} for one in MANY[:5]]
        calls = LlamaCppEngine._calls

        def counted(self: Any, sequence: Any, place: Any, block: Block) -> Any:
            rows.append(len(block.tokens))
            return calls(self, sequence, place, block)

        model.decide("a", [PREDICATE])  # measures the machine
        monkeypatch.setattr(LlamaCppEngine, "_calls", counted)
        result = model.decide(text, questions)
        assert sum(rows) <= 1.1 * result.input_tokens
        assert bits(model.without_history(), questions[-1:], text) == [
            result.answers[-1].probabilities
        ]


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        ([], "questions: expected a list of 1 to 400"),
        ([PREDICATE] * 401, "questions: expected a list of 1 to 400"),
        ([{**PREDICATE, "type": []}], "questions[0].type: expected predicate"),
        (["Is it?"], "questions[0].type: expected predicate, choice or score"),
        ([PREDICATE, {**PREDICATE, "type": "noul"}], "questions[1].type: expected predicate"),
        ([{"type": "predicate"}], "questions[0].instructions"),
        ([{**PREDICATE, "choices": []}], "questions[0].choices: expected no other fields"),
        ([{**PREDICATE, "name": 5}], "questions[0].name: expected text"),
        ([{**CHOICE, "choices": [{"value": "a"}]}], "questions[0].choices: expected a list of 2"),
        (
            [{**CHOICE, "choices": [{"value": "a"}] * 2}],
            "questions[0].choices[1].value: expected each once",
        ),
        ([{**CHOICE, "choices": [{"value": 1}] * 2}], "questions[0].choices[0].value: expected"),
        ([{**SCORE, "levels": [{"label": True}] * 2}], "questions[0].levels[0].label: expected"),
        ([{**SCORE, "levels": [{"label": "a"}] * 2}], "questions[0].levels[1].label: exp"),
        (
            [{**PREDICATE, "instructions": [{"type": "input_image"}]}],
            "questions[0].instructions[0]",
        ),
        ([{**PREDICATE, "instructions": "a" * 600}], "input: has"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_invalid_question_is_rejected_with_its_field_path(
    questions: Any, words: str, model: Model
):
    with raises(InvalidRequest, words):
        model.decide(INPUT, questions)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "input: expected text"),
        ([], "input: expected text"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0]"),
        ([{"role": "judge", "content": "a"}], "roles are system, user and assistant"),
    ],
    ids=str,
)
def test_an_invalid_decision_input_is_rejected(given: Any, words: str, model: Model):
    with raises(InvalidRequest, words):
        model.decide(given, QUESTIONS)
