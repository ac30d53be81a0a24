"""The `anthropic` package: messages with a tool, streamed and whole; tokens, models, errors."""

import sys
from pathlib import Path

from anthropic import Anthropic, BadRequestError, NotFoundError

TASK = {"role": "user", "content": "Write hello.txt."}
TOOL = {
    "name": "write_file",
    "description": "Writes a file",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
    },
}
URL = sys.argv[1].removesuffix("/v1")
client = Anthropic(base_url=URL, api_key="none", max_retries=0)


def ask(messages, *, stream: bool):
    """One answer."""
    fields = {"model": "scripted", "max_tokens": 1000, "tools": [TOOL], "messages": messages}
    if not stream:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as events:
        for _ in events:
            pass
        return events.get_final_message()


for stream in (False, True):
    first = ask([TASK], stream=stream)
    assert [block.type for block in first.content] == ["thinking", "tool_use"], first.content
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    Path(call.input["path"]).write_text(call.input["content"])
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "written"}
    turns = [
        TASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = ask(turns, stream=stream)
    assert second.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model="scripted", messages=turns, tools=[TOOL])
    usage = second.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    print(f"stream={stream}: {second.content[0].text}")

(listed,) = client.models.list(limit=1)
assert (listed.id, listed.type, listed.display_name) == ("scripted", "model", "scripted")
assert client.models.retrieve("scripted") == listed
assert listed.created_at.year > 2000

try:
    client.models.retrieve("none")
except NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError("a model that is not here")

for wrong, fields in ((NotFoundError, {"model": "none"}), (BadRequestError, {"max_tokens": -1})):
    try:
        client.messages.create(
            **({"model": "scripted", "max_tokens": 9, "messages": [TASK]} | fields)
        )
    except wrong as error:
        assert error.body["type"] == "error"
    else:
        raise AssertionError(fields)
