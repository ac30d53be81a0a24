"""POST /v1/decisions, with OpenAI's client and over plain HTTP."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.server import Running, good

PREDICATE = {"type": "predicate", "instructions": "it rains"}
CHOICE = {
    "type": "choice",
    "name": "which",
    "instructions": [{"type": "input_text", "text": "which one?"}],
    "choices": [{"value": "a", "description": "b"}, {"value": False}],
}
SCORE = {
    "type": "score",
    "instructions": [{"type": "input_json", "data": {"a": 1}}],
    "levels": [{"label": "dry"}, {"label": "wet"}, {"label": "sea"}],
}
QUESTIONS: list[Any] = [PREDICATE, CHOICE, SCORE]
BODY: dict[str, Any] = {"input": "the rain", "questions": QUESTIONS}


def decided(server: Running, **body: Any) -> Any:
    return good(server.post("/v1/decisions", {**BODY, **body}))


def test_the_openai_client_gets_the_decisions_of_the_python_api(server: Running):
    response = server.openai.decisions.create(model="tiny", **BODY)
    expected = server.model.without_history().decide("the rain", QUESTIONS)
    predicate, choice, score = response.answers
    assert (predicate.type, predicate.name) == ("predicate", None)
    assert predicate.probability == expected.answers[0].probability
    assert (choice.type, choice.name, choice.choice) == (
        "choice",
        "which",
        expected.answers[1].choice,
    )
    assert [one.value for one in choice.probabilities] == ["a", False]
    assert (score.type, score.score) == ("score", expected.answers[2].score)
    assert [(one.label, one.value) for one in score.probabilities][1:] == [("wet", 1), ("sea", 2)]
    assert [answer.to_dict() for answer in response.answers] == expected.as_dict()["answers"]
    assert response.usage.input_tokens == response.usage.total_tokens == expected.input_tokens
    assert (response.model, response.usage.output_tokens) == ("tiny", 0)
    counted = server.get("/metrics").text
    assert "paceline_decisions_total 3.0" in counted


def test_a_decision_is_bit_identical_under_load_and_with_its_own_key(server: Running):
    alone = decided(server, prompt_cache_key="another")
    assert alone["exact"]
    chat = {"messages": [{"role": "user", "content": "the rain"}], "max_tokens": 30}
    with ThreadPoolExecutor(4) as pool:
        crowd = [pool.submit(decided, server) for _ in range(4)]
        chats = [pool.submit(server.post, "/v1/chat/completions", chat) for _ in range(2)]
        assert all(one.result()["answers"] == alone["answers"] for one in crowd)
        assert {one.result().status_code for one in chats} == {200}
    again = decided(server, prompt_cache_key="a third")
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == 0
    cached = decided(server, prompt_cache_key="a third")
    assert cached["answers"] == alone["answers"]
    assert cached["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_tool_calls_and_results_are_valid_decision_input(server: Running):
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "x"}
    items = [
        *({"role": "user", "content": "a"}, call),
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
        *(custom, {"type": "custom_tool_call_output", "call_id": "2", "output": "sun"}),
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    ]
    assert decided(server, input=items)["answers"] != decided(server)["answers"]
    response = server.post("/v1/decisions", {**BODY, "input": items[2:]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input[0].call_id"


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
USER = {"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"questions": []}, "questions"),
        (
            {"questions": [PREDICATE, {**CHOICE, "choices": [{"value": "a"}]}]},
            "questions[1].choices",
        ),
        ({"input": [USER, {"role": "assistant", "content": "b"}]}, "input[0].content[1]"),
        ({"input": "a " * 600}, "input"),
        ({"temperature": 0.5}, "temperature"),
        *(({field: [USER]}, field) for field in ("messages", "functions")),
        ({"model": "other"}, "model"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_invalid_decision_request_is_rejected_with_its_field(
    body: Any, param: str | None, server: Running
):
    response = server.post("/v1/decisions", {**BODY, **body})
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param


SYSTEM_ONE: dict[str, Any] = {
    "state": {"weather": "rain"},
    "questions": {
        "wet": {"type": "noul", "instructions": "is it wet?", "criteria": {"true": "it rains"}},
        "which": {"type": "choice", "instructions": "which?", "criteria": {"a": "b", "c": None}},
        "depth": {"type": "score", "instructions": {"how": "deep"}, "criteria": ["dry", "sea"]},
    },
}


def test_system_one_has_the_bits_of_decisions(server: Running):
    response = server.post("/v1/systemone", SYSTEM_ONE)
    assert response.status_code == 200, response.text
    wet, which, depth = decided(
        server,
        input='{"weather": "rain"}',
        questions=[
            {
                "type": "choice",
                "instructions": "is it wet?",
                "choices": [{"value": True, "description": "it rains"}, {"value": False}],
            },
            {
                "type": "choice",
                "instructions": "which?",
                "choices": [{"value": "a", "description": "b"}, {"value": "c"}],
            },
            {
                "type": "score",
                "instructions": '{"how": "deep"}',
                "levels": [{"label": "dry"}, {"label": "sea"}],
            },
        ],
    )["answers"]
    assert response.json()["answers"] == {
        "wet": {"type": "noul", "noul": wet["probabilities"][0]["probability"]},
        "which": {
            "type": "choice",
            "choice": which["choice"],
            "confidence": which["confidence"],
            "probabilities": {one["value"]: one["probability"] for one in which["probabilities"]},
        },
        "depth": {
            "type": "score",
            "score": depth["score"],
            "confidence": depth["confidence"],
            "legend": {"0": "dry", "1": "sea"},
            "probabilities": {
                str(one["value"]): one["probability"] for one in depth["probabilities"]
            },
        },
    }


@pytest.mark.parametrize(
    ("question", "named"),
    [
        ({"type": "predicate", "instructions": "x"}, "questions.q.type: expected noul"),
        ({"type": "noul"}, "questions.q.instructions"),
        ({"type": "noul", "instructions": "x", "levels": []}, "unknown field levels"),
        ({"type": ["noul"], "instructions": "x"}, "questions.q.type: expected noul"),
        ({"type": "noul", "instructions": "x", "criteria": 3}, "questions.q.criteria"),
        (
            {"type": "noul", "instructions": "x", "criteria": {"yes": "a"}},
            "expected true and false",
        ),
        ({"type": "choice", "instructions": "x", "criteria": [{}, "a"]}, "expected unique texts"),
        ({"type": "choice", "instructions": "x", "criteria": ["a", "a"]}, "expected unique texts"),
        ({"type": "choice", "instructions": "x", "criteria": {"a": None}}, "questions.q.criteria"),
        ({"type": "choice", "instructions": "x"}, "questions.q.criteria"),
        ({"type": "score", "instructions": "x", "criteria": "a"}, "questions.q.criteria"),
        ({"type": "score", "instructions": "x", "criteria": ["a", "a"]}, "questions.q.criteria"),
    ],
)
def test_an_invalid_question_of_system_one_is_rejected_by_its_name(
    question: dict[str, Any], named: str, server: Running
):
    response = server.post("/v1/systemone", {"state": "s", "questions": {"q": question}})
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
