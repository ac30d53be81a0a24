"""See how sure a model is of each token, and what it would have said instead."""

from math import exp

import paceline

with paceline.load() as model:
    answer = model.generate("Name a colour.", max_tokens=10, temperature=0.0, logprobs=3)
    for logprob in answer.logprobs:
        others = ", ".join(
            f"{text!r} {exp(value):.0%}"
            for (_, value), text in zip(logprob.top, logprob.top_texts, strict=True)
        )
        print(f"{logprob.text!r} {exp(logprob.logprob):.0%} of {others}")
    tokens = model.tokens("red and blue", raw=True)
    assert model.detokenize(tokens) == "red and blue"
