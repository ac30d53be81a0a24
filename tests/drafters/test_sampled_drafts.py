"""Drafters that follow a request's noise: no token differs."""

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Counters
from paceline.drafters import RequestContext, create
from support.driver import generation, run, total
from support.toy import ToyEngine

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [*range(40, 60)], [30, 5, 5, 9]]


def answers(how: Sampling, spec: str = "none") -> tuple[list[list[int]], Counters]:
    """Answers to all prompts, which share their calls, and the sum of their counters."""
    ran, engine = [], ToyEngine()
    for prompt in PROMPTS:
        asked = RequestContext(sampling=how, prompt_length=len(prompt))
        drafters: Sequence[Any] = () if spec == "none" else create(spec, None, asked)
        options: Any = {"stopping": Stopping(max_tokens=40), "policy": Fixed(4)}
        ran.append(generation(engine, prompt, sampling=how, drafters=drafters, **options))
    told = [one.tokens for one in run(engine, ran)]
    return told, total(ran)


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0])
def test_no_token_differs_with_any_drafter(temperature: float):
    penalty = 0.4 if temperature == 0.8 else 0.0
    how = Sampling(temperature=temperature, seed=3, top_p=0.9, frequency_penalty=penalty)
    plain, _ = answers(how)
    assert len({tuple(result) for result in plain}) == len(PROMPTS)
    for spec in ("suffix", "suffix+ngram:min=1"):
        told, counters = answers(how, spec)
        assert told == plain, spec
        assert counters.drafted > 0, spec
