"""Prompts, samplings and the answers of plain decoding, to compare other answers with."""

from collections.abc import Callable

import numpy as np

from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.engines.base import Engine
from support.driver import Answer, answer

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.4, seed=1),
    Sampling(temperature=1.0, seed=2),
    Sampling(temperature=1.6, seed=3),
    Sampling(temperature=0.9, top_k=5, seed=4),
    Sampling(temperature=1.0, top_p=0.7, seed=5),
    Sampling(temperature=1.2, min_p=0.05, seed=6),
    Sampling(repetition_penalty=1.2),
    Sampling(temperature=0.8, presence_penalty=0.6, frequency_penalty=1.5, seed=7),
    Sampling(
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.1,
        frequency_penalty=0.8,
        logit_bias={3: 2.0, 4: -5.0},
        seed=8,
    ),
    Sampling(temperature=1.0, seed=2**64 - 1),
]

TOKENS = 24


Plainly = Callable[..., Answer]


def prompt_of(engine: Engine, which: int) -> list[int]:
    """Prompts that repeat themselves a little, of different lengths."""
    rng = np.random.default_rng(100 + which)
    part = rng.integers(0, engine.vocab_size, 3 + which).tolist()
    return [*part, *rng.integers(0, engine.vocab_size, 2 + which % 5).tolist(), *part]


def plain_answers(engine: Engine) -> Plainly:
    """Plain decoding's answer, alone on the engine, one row at a time."""
    known: dict[tuple[int, int], Answer] = {}

    def plain(prompt: int, sampling: int) -> Answer:
        key = prompt, sampling
        if key not in known:
            known[key] = answer(
                engine,
                prompt_of(engine, prompt),
                sampling=SAMPLINGS[sampling],
                stopping=Stopping(max_tokens=TOKENS),
            )
        return known[key]

    return plain
