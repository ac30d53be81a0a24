"""Answer in coroutines: several at once, as in a list of prompts."""

import asyncio

import paceline


async def main(model: paceline.Model) -> None:
    """Ask two questions at once, then stream an answer."""
    answers = await asyncio.gather(
        model.agenerate("What is rain?", max_tokens=30),
        model.agenerate("What is snow?", max_tokens=30),
    )
    for answer in answers:
        print(answer.text.strip())
    async with model.astream("What is hail?", max_tokens=30) as stream:
        async for step in stream:
            print(step.text, end="", flush=True)
    print()


with paceline.load() as model:
    asyncio.run(main(model))
