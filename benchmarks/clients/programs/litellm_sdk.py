"""The `litellm` package: chats, responses and messages with a tool."""

import json
import sys
from pathlib import Path

import litellm

TASK = {"role": "user", "content": "Write hello.txt."}
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
}
TOOL = {
    "type": "function",
    "function": {"name": "write_file", "description": "Writes a file", "parameters": PARAMETERS},
}
URL = sys.argv[1]
PROVIDERS = {"openai": URL, "anthropic": URL.removesuffix("/v1")}


def ask(provider: str, messages, *, stream: bool):
    """One answer of a chat."""
    found = litellm.completion(
        model=f"{provider}/scripted",
        api_base=PROVIDERS[provider],
        api_key="none",
        messages=messages,
        tools=[TOOL],
        stream=stream,
    )
    return (litellm.stream_chunk_builder(list(found)) if stream else found).choices[0].message


for provider in PROVIDERS:
    for stream in (False, True):
        message = ask(provider, [TASK], stream=stream)
        (call,) = message.tool_calls
        given = json.loads(call.function.arguments)
        Path(given["path"]).write_text(given["content"])
        result = {"role": "tool", "tool_call_id": call.id, "content": "written"}
        second = ask(provider, [TASK, message.model_dump(), result], stream=stream)
        print(f"{provider} stream={stream}: {second.content}")
