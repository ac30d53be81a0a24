"""The `openai` package: chat and responses with a tool, streamed and whole, and responses by id."""

import json
import sys
from pathlib import Path

from openai import BadRequestError, OpenAI

TASK = "Write hello.txt."
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
}
ABOUT = {"name": "write_file", "description": "Writes a file", "parameters": PARAMETERS}
TOOL = {"type": "function", **ABOUT}
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)


def write(arguments: str) -> str:
    """Run the tool."""
    given = json.loads(arguments)
    Path(given["path"]).write_text(given["content"])
    return "written"


def responses_by_id(*, stream: bool, tool=TOOL) -> str:
    """The task by the id of the first response."""

    def ask(**fields):
        if not stream:
            return client.responses.create(model="scripted", tools=[tool], **fields)
        with client.responses.stream(model="scripted", tools=[tool], **fields) as events:
            for _ in events:
                pass
            return events.get_final_response()

    first = ask(input=TASK)
    assert [item.type for item in first.output] == ["reasoning", "function_call"], first.output
    call = first.output[-1]
    assert (call.name, call.namespace) == ("write_file", None if tool is TOOL else tool["name"])
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": write(call.arguments),
    }
    second = ask(input=[result], previous_response_id=first.id)
    items = [{"role": "user", "content": TASK}, *first.output, result]
    assert ask(input=items, store=False).output_text == second.output_text
    assert client.responses.retrieve(first.id).output_text == ""
    client.responses.delete(first.id)
    try:
        ask(input="a", previous_response_id=first.id)
    except BadRequestError as error:
        assert error.code == "previous_response_not_found"
    return second.output_text


def chat(*, stream: bool) -> str:
    """The task as a chat."""

    def ask(messages):
        fields = {"model": "scripted", "messages": messages}
        fields["tools"] = [{"type": "function", "function": ABOUT}]
        if not stream:
            return client.chat.completions.create(**fields).choices[0].message
        with client.chat.completions.stream(**fields) as events:
            for _ in events:
                pass
            return events.get_final_completion().choices[0].message

    asked = [{"role": "user", "content": TASK}]
    message = ask(asked)
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": write(call.function.arguments)}
    return ask([*asked, message.model_dump(exclude_none=True), result]).content


def namespace(*, stream: bool) -> str:
    """The same with the function in a namespace."""
    tools = {"type": "namespace", "name": "disk", "description": "A disk.", "tools": [TOOL]}
    return responses_by_id(stream=stream, tool=tools)


for work in (responses_by_id, namespace, chat):
    for stream in (False, True):
        print(f"{work.__name__} stream={stream}: {work(stream=stream)}")
