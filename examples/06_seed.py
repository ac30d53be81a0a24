"""Sample an answer, and get it again by its seed: its tokens are the same without drafts."""

import paceline

prompt = "Write a line about the sea."

with paceline.load() as model:
    answer = model.generate(prompt, max_tokens=40, temperature=0.9)
    print(answer.text)
    again = model.generate(prompt, max_tokens=40, temperature=0.9, seed=answer.seed, drafter="none")
    assert again.token_ids == answer.token_ids
    print(
        f"seed {answer.seed}: {answer.stats.steps} calls with drafts, {again.stats.steps} without"
    )
