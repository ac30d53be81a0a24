"""OpenAI's responses without tools, read by the real client."""

from typing import Any

import pytest

from support.server import Running

CHAT: list[Any] = [{"role": "user", "content": "this is the one"}]


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
