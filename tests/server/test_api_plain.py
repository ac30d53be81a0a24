"""Models, tokens and health."""

import json
from datetime import datetime
from typing import Any

from paceline.server.http import to_json
from support.server import Running


def test_the_model_is_listed_and_found(server: Running):
    (listed,) = server.openai.models.list().data
    assert listed.id == "tiny"
    assert server.openai.models.retrieve("tiny").id == "tiny"
    for path in ("/models", "/v1/models/", "/models/"):
        assert server.get(path).json() == server.get("/v1/models").json()
    assert listed.model_dump()["max_model_len"] == 512
    assert server.get("/v1/models/other/one").status_code == 404


def test_the_list_of_models_is_a_page_of_anthropics_too(server: Running):
    headers = {"anthropic-version": "2023-06-01"}
    page = server.get("/v1/models?limit=1", headers=headers).json()
    (listed,) = page["data"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "tiny", "tiny")
    assert (listed["type"], listed["display_name"]) == ("model", "tiny")
    at = datetime.strptime(listed["created_at"], "%Y-%m-%dT%H:%M:%S%z")
    assert at.timestamp() == listed["created"]
    assert server.get("/v1/models/tiny", headers=headers).json() == listed


def test_an_unknown_model_is_an_error_in_the_form_of_its_client(server: Running):
    openai = server.get("/v1/models/other")
    anthropic = server.get("/v1/models/other", headers={"anthropic-version": "2023-06-01"})
    assert (openai.status_code, anthropic.status_code) == (404, 404)
    assert openai.json()["error"]["code"] == "model_not_found"
    assert anthropic.json()["type"] == "error"
    assert anthropic.json()["error"]["type"] == "not_found_error"
    assert "other" in anthropic.json()["error"]["message"]


def test_tokens_are_those_of_a_prompt(server: Running):
    text = "the rain <|im_end|>"
    ids = server.model.tokens(text, raw=True)
    response = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert response["tokens"] == ids
    assert "".join(response["token_strs"]) == text
    plain = server.post("/tokenize", {"content": text, "parse_special": False}).json()
    assert len(plain["tokens"]) > len(ids)
    pieces = server.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert pieces[-1]["piece"] == "<|im_end|>"


def test_a_chat_can_be_counted(server: Running):
    messages: list[Any] = [{"role": "user", "content": "how many?"}]
    response = server.post("/tokenize", {"messages": messages}).json()
    used = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    assert response["count"] == used["usage"]["prompt_tokens"]
    shorter = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert shorter.json()["count"] < response["count"]


def test_tokenizer_info_has_the_special_tokens(server: Running):
    assert server.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"


def test_health_is_ok_until_the_engine_ends(own_server: Running):
    assert own_server.get("/health").json() == {"status": "ok"}
    own_server.scheduler.close()
    assert own_server.get("/v1/health").status_code == 503


def test_json_is_one_line_for_every_reader():
    value = {"text": "a\x85b\u2028c\u2029d\x1ce\nf\u00e9"}
    written = to_json(value).decode()
    assert len(written.splitlines()) == 1
    assert "\u00e9" in written
    assert json.loads(written) == value
