"""The `openai-agents` package: an agent with a tool, over responses and over chats."""

import asyncio
import sys
from pathlib import Path

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def write_file(path: str, content: str) -> str:
    """Write a file."""
    Path(path).write_text(content)
    return "written"


async def main() -> None:
    """The task with each kind of model, streamed and whole."""
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model="scripted", openai_client=client)
        agent = Agent(name="writer", instructions="Write files.", tools=[write_file], model=model)
        result = await Runner.run(agent, "Write hello.txt.")
        print(f"{kind.__name__}: {result.final_output}")
        streamed = Runner.run_streamed(agent, "Write hello.txt.")
        async for _ in streamed.stream_events():
            pass
        print(f"{kind.__name__} streamed: {streamed.final_output}")


asyncio.run(main())
