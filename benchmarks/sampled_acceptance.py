"""How often a drafter's token is the target's pick, at temperatures, by the rule of the draft.

    python benchmarks/sampled_acceptance.py DRAFTER --suite question.jsonl --output FILE

The target answers the first turn of a suite's questions, sampled; then both models read the
answers, and each position is decided from their rows by three rules: the drafter's likeliest token,
one random number of the position for both (the inverse of the cumulative distribution), and a
number for each token (docs/decisions/sampling.md). The bound is 1 - TV, which no rule exceeds.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

import paceline
from paceline.decoding.draft_sampling import DraftSampler
from paceline.decoding.sampling import Sampler, Sampling
from paceline.decoding.types import Block
from paceline.engines.base import Engine
from paceline.tools.suite import load_suite

RULES = ("likeliest", "one number", "a number for each token", "bound")
CHUNK = 64
SEED = 7


def main() -> None:
    """Measure, print, and write the result to --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter", help="name or path of a model with the target's vocabulary")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    suite = load_suite(options.suite)
    prompts = suite.only((), limit=options.limit).prompts
    target = paceline.load(options.target, drafters=("none",))
    drafter = paceline.load(options.drafter, drafters=("none",))
    found = {}
    for temperature in options.temperature or (0.5, 0.8, 1.0):
        how = Sampling(temperature=temperature, seed=SEED)
        shares = []
        for prompt in prompts:
            tokens = target.encode_prompt(list(prompt.messages), target.request({}))[0]
            answer = target.generate(
                list(prompt.messages),
                temperature=temperature,
                top_p=1.0,
                repetition_penalty=1.0,
                frequency_penalty=0.0,
                seed=SEED,
                max_tokens=options.max_tokens,
            )
            shares += _compare(target.engine, drafter.engine, how, tokens, answer.token_ids)
        means = np.mean(shares, axis=0)
        found[str(temperature)] = {
            "tokens": len(shares),
            **{rule: round(float(each), 4) for rule, each in zip(RULES, means, strict=True)},
        }
    result = {
        "command": " ".join(["python", *sys.argv]),
        "target": options.target,
        "engine": target.engine.describe(),
        "drafter_engine": drafter.engine.describe(),
        "suite": suite.sha256,
        "questions": len(prompts),
        "max_tokens": options.max_tokens,
        "temperatures": found,
    }
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def _compare(
    target: Engine, drafter: Engine, how: Sampling, prompt: Sequence[int], answer: Sequence[int]
) -> list[list[float]]:
    """By position of the answer: whether each rule's draft is the pick, and 1 - TV."""
    text = [*prompt, *answer]
    sampler = Sampler(how, prompt, target.vocab_size)
    drafting = DraftSampler(how, len(prompt), drafter.vocab_size)
    found = []
    pairs = zip(_rows(target, text), _rows(drafter, text), strict=True)
    for at, (row, draft) in enumerate(pairs, start=1):
        if at < len(prompt):
            continue
        one, other = (_softmax(each, how.temperature) for each in (row, draft))
        u = np.random.default_rng((how.seed, at)).random()
        picks = [int(each.cumsum().searchsorted(u)) for each in (one, other)]
        token = sampler.pick(row, at)
        found.append(
            [
                float(draft.argmax() == token),
                float(picks[0] == picks[1]),
                float(drafting.pick(draft, at)[0] == token),
                1 - float(np.abs(one - other).sum()) / 2,
            ]
        )
    return found


def _rows(engine: Engine, text: Sequence[int]) -> Iterator[npt.NDArray[np.float32]]:
    """Logits after each token but the last."""
    sequence = engine.open()
    try:
        for at in range(0, len(text) - 1, CHUNK):
            part = text[at : min(at + CHUNK, len(text) - 1)]
            rows = engine.step([(sequence, Block(part, len(part), prefill=True))]).logits[0].copy()
            sequence.commit(len(part))
            yield from rows
    finally:
        sequence.close()


def _softmax(row: npt.NDArray[np.float32], temperature: float) -> npt.NDArray[np.float64]:
    weights = np.exp((row - row.max()).astype(np.float64) / temperature)
    found: npt.NDArray[np.float64] = weights / weights.sum()
    return found


if __name__ == "__main__":
    main()
