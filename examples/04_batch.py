"""Answer many prompts together; each gets the tokens that it gets alone.

`contexts=4` has KV slots for four of the longest; with `parallel=8` eight share calls.
"""

import paceline

topics = ["rivers", "maps", "bread", "clocks", "bridges", "salt", "glass", "wind"]
prompts = [f"Say one thing about {topic}." for topic in topics]

with paceline.load(contexts=4) as model:
    answers = model.generate(prompts, max_tokens=30, temperature=0.8, seed=1)
    alone = model.generate(prompts[0], max_tokens=30, temperature=0.8, seed=1)
    assert alone.token_ids == answers[0].token_ids
    for number, answer in model.as_completed(
        prompts, max_tokens=30
    ):  # in the order in which they end
        print(f"{prompts[number]} {answer.text.strip()}")
