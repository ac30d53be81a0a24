"""Print an answer as it comes, then what it took."""

import paceline

with paceline.load() as model:
    with model.stream("Explain what a river is.", max_tokens=60) as stream:
        for step in stream:
            print(step.text, end="", flush=True)
    print(f"\n{stream.result.line()}")
