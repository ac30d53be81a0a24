"""OpenAI's responses without tools, read by the real client."""

from typing import Any

import pytest

from support.server import Running

CHAT: list[Any] = [{"role": "user", "content": "this is the one"}]


def test_an_answer_is_the_one_that_generate_gives(server: Running):
    expected = server.model.generate(
        [{"role": "system", "content": "short"}, *CHAT], max_tokens=20, drafter="none"
    )
    response = server.openai.responses.create(
        model="tiny",
        input="this is the one",
        instructions="short",
        temperature=0,
        max_output_tokens=20,
    )
    assert response.output_text == expected.text
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 20


@pytest.mark.parametrize("most", [1, 20])
def test_a_stream_is_read_by_the_client(server: Running, most: int):
    expected = server.model.generate(CHAT, max_tokens=most, drafter="none")
    text, kinds = "", list[str]()
    items: Any = [
        {
            "role": "user",
            "type": "message",
            "content": [{"type": "input_text", "text": "this is the one"}],
        }
    ]
    with server.openai.responses.stream(
        model="tiny", input=items, temperature=0, max_output_tokens=most
    ) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
    assert text == expected.text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"


def test_an_answer_with_a_stop_token_is_completed(server: Running):
    values: Any = {"type": "json_schema", "name": "n", "schema": {"enum": ["yes"]}}
    with server.openai.responses.stream(
        model="tiny", input="say yes", text={"format": values}, include=LOGPROBS, top_logprobs=1
    ) as stream:
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == '"yes"'
    message: Any = final.output[0]
    (part,) = message.content
    assert "".join(logprob.token for logprob in part.logprobs) == '"yes"'


LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("prompt", {"id": "p"}),
        ("background", True),
        ("conversation", "c"),
        ("tool_choice", {"type": "web_search"}),
        ("truncation", "auto"),
        ("text", {"format": {"type": "json_schema"}}),
    ],
)
def test_unsupported_fields_are_rejected(server: Running, field: str, value: Any):
    response = server.post("/v1/responses", {"input": "a", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)
