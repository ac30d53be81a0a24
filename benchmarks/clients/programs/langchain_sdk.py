"""The `langchain-openai` package: a tool round trip over chats and over responses."""

import sys
from pathlib import Path

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def write_file(path: str, content: str) -> str:
    """Write a file."""
    Path(path).write_text(content)
    return "written"


for responses in (False, True):
    for stream in (False, True):
        model = ChatOpenAI(
            model="scripted",
            base_url=sys.argv[1],
            api_key="none",
            max_retries=0,
            use_responses_api=responses,
        ).bind_tools([write_file])

        def ask(messages, model=model, stream=stream):
            """One answer."""
            if not stream:
                return model.invoke(messages)
            whole = None
            for chunk in model.stream(messages):
                whole = chunk if whole is None else whole + chunk
            return whole

        turns = [HumanMessage("Write hello.txt.")]
        first = ask(turns)
        (call,) = first.tool_calls
        result = ToolMessage(write_file.invoke(call["args"]), tool_call_id=call["id"])
        second = ask([*turns, first, result])
        print(f"responses={responses} stream={stream}: {second.text}")
