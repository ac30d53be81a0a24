"""Values that no client should send get 200 or a client error, and the server survives."""

from collections.abc import Iterator

import pytest

from support.server import HTTP, Running

VALUES = [
    *("NaN", "1e400", "1" + "0" * 400, "9" * 5000, "-" + "9" * 30, "-1", "0.5"),
    *('"1"', '"\\ud800"', "[]", '{"a": 1}'),
]
"""As JSON texts; some are none."""

BODIES = {
    "/v1/completions": '"prompt": "a", "max_tokens": 2',
    "/v1/chat/completions": '"messages": [{"role": "user", "content": "a"}], "max_tokens": 2',
    "/v1/responses": '"input": "a", "max_output_tokens": 2',
    "/v1/messages": '"messages": [{"role": "user", "content": "a"}], "max_tokens": 2',
}

NESTED = {
    "logit_bias": ('{"5": %s}',),
    "stop": ("[%s]",),
    "speculation": ('{"max_block": %s}', '{"drafter": %s}', '{"policy": %s}'),
    "stream_options": ('{"include_usage": %s}',),
    "prediction": ('{"type": "content", "content": %s}',),
    "structured_outputs": ('{"regex": %s}', '{"choice": [%s]}', '{"json": %s}'),
    "chat_template_kwargs": ('{"enable_thinking": %s}',),
    "metadata": ('{"a": %s}',),
    "input": ('[{"type": "function_call", "call_id": "c", "name": "f", "arguments": %s}]',),
    "tool_choice": ('{"type": "function", "name": %s}', '{"type": %s}'),
    "tools": ('[{"type": "function", "name": "f", "parameters": {"const": %s}}]',),
    "reasoning": ('{"effort": %s}',),
    "system": ('[{"type": "text", "text": %s}]',),
    "thinking": ('{"type": "enabled", "budget_tokens": %s}', '{"type": %s}'),
    "output_config": ('{"format": {"type": "json_schema", "schema": {"const": %s}}}',),
}


@pytest.fixture(scope="module")
def fields(module_server: Running) -> dict[str, list[str]]:
    """The fields of each path's body, as the server itself describes them."""
    about = module_server.get("/openapi.json").json()
    values: dict[str, list[str]] = {}
    known: set[str] = set()
    for path in BODIES:
        schema = about["paths"][path]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]
        if "$ref" in schema:
            schema = about["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        # What several paths have is asked of the first.
        values[path] = [name for name in schema["properties"] if name not in known]
        known |= {*values[path]}
    return values


def bodies(path: str, fields: dict[str, list[str]]) -> Iterator[str]:
    """A body for each field, or form, and value."""
    forms = [
        f'{{{BODIES[path]}, "{field}": {form}}}'
        for field in fields.get(path, ())
        for form in ("%s", *NESTED.get(field, ()))
    ]
    for form in forms or OTHER_BODIES[path]:
        yield from (form % value for value in VALUES)


OTHER_BODIES = {
    "/tokenize": ('{"prompt": %s}', '{"content": "a", "with_pieces": %s}', '{"messages": [%s]}'),
    "/detokenize": ('{"tokens": %s}', '{"tokens": [%s]}', '{"tokens": [5], "model": %s}'),
    "/v1/messages/count_tokens": (
        '{"messages": [{"role": "user", "content": %s}]}',
        '{"messages": [{"role": "user", "content": "a"}], "max_tokens": %s}',
        '{"messages": [{"role": "user", "content": "a"}], "thinking": {"budget_tokens": %s}}',
    ),
    "/v1/decisions": (
        '{"input": %s, "questions": [{"type": "predicate", "instructions": "a"}]}',
        '{"input": "a", "questions": %s}',
        '{"input": "a", "questions": [{"type": "predicate", "instructions": %s}]}',
        '{"input": "a", "questions": [{"type": "score", "instructions": "a", "levels": [%s]}]}',
        '{"input": "a", "questions": [{"type": %s, "instructions": "a"}]}',
    ),
    "/v1/systemone": (
        '{"state": %s, "questions": {"a": {"type": "noul", "instructions": "a"}}}',
        '{"state": "", "questions": {"": {"type": "choice", "instructions": "a", "criteria": %s}}}',
        '{"state": "", "questions": {"": {"type": "score", "instructions": "", "criteria": [%s]}}}',
    ),
    "/v1/embeddings": ('{"input": %s}', '{"input": "a", "dimensions": %s}'),
}
"""Of paths that generate nothing; 501 is for embeddings of a model that makes none."""


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES | OTHER_BODIES)
def test_no_value_of_any_field_causes_a_server_error(
    path: str, server: Running, fields: dict[str, list[str]]
):
    statuses = set()
    for body in bodies(path, fields):
        response = server.post(path, body.encode())
        statuses.add(response.status_code)
        known = response.status_code in (200, 400, 404, 501)
        assert known, f"{body[:200]}: {response.text[:200]}"
    assert statuses & ({400} if path in BODIES else {400, 501})
    assert server.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "name", ["9" * 5000, "-1", "%00", "%ff", "a/../b", "%2e%2e%2fa", "{}", "é"]
)
def test_no_name_in_a_path_causes_a_server_error(name: str, server: Running):
    for path in ("/v1/models/", "/v1/responses/"):
        assert server.get(path + name).status_code == 404
    assert HTTP.delete(f"{server.url}/v1/responses/{name}").status_code == 404
