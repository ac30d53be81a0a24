"""How often drafts are accepted at a temperature, by the rule that picks them.

    python benchmarks/sampled_acceptance.py --suite question.jsonl --model FILE.gguf --output FILE
    python benchmarks/sampled_acceptance.py --suite question.jsonl --dflash FOLDER --output FILE

The target answers the first turn of a suite's questions, sampled. Each answer is then gone through
as decoding does, in blocks: at each step a drafter is asked, and as many drafts are accepted as
equal the answer. Two rules: `best`, the drafter's likeliest token, and `noise`, the pick by the
request's own random numbers (docs/decisions/sampling.md). For the first draft of a step there are
the bounds, from the rows of both: no rule is accepted more often than 1 - TV, and `noise` at least
by (1 - TV) / (1 + TV). The token of a table is its one successor by either rule.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import paceline
from paceline.decoding.draft_sampling import DraftSampler
from paceline.decoding.sampling import Sampling
from paceline.decoding.types import Block, ComputedBlock, Proposal, common_prefix_length
from paceline.drafters import DrafterResources, RequestContext, create
from paceline.drafters.factory import shipped
from paceline.engines.base import Engine
from paceline.verify.suite import load_suite

Row = npt.NDArray[np.float32]

DRAFTS = 7
CHUNK = 64
SEED = 7
TARGET = "smollm2-135m"


@dataclass
class Text:
    """A prompt and its answer, and what the target computes for it."""

    tokens: list[int]
    prompt: int
    """Tokens of the prompt."""
    rows: list[Row] = field(default_factory=list)
    """Logits after each token but the last."""
    taps: list[dict[str, Row]] = field(default_factory=list)


@dataclass
class Count:
    """Sums over steps."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    first: int = 0
    """First drafts that were accepted."""
    asked: int = 0
    """Steps with a draft."""
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def result(self) -> dict[str, float]:
        """The shares."""
        found: dict[str, float] = {
            "steps with a draft": self.asked,
            "first draft accepted": round(self.first / max(self.asked, 1), 4),
            "tokens per step": round(self.tokens / max(self.steps, 1), 3),
        }
        if self.most:
            found["bounds of noise"] = [  # type: ignore[assignment]
                round(float(np.mean(each)), 4) for each in (self.least, self.most)
            ]
        return found


class Watched(DraftSampler):
    """Keeps the first row that it picks from in a step, over the whole vocabulary."""

    row: Row | None = None
    size = 0

    def pick(self, logits: Row, position: int, tokens: Any = None) -> tuple[int, float]:
        """See `DraftSampler`."""
        if self.row is None:
            self.row = np.full(self.size, -np.inf, np.float32)
            self.row[slice(None) if tokens is None else tokens] = logits
        return super().pick(logits, position, tokens)


def main() -> None:
    """Measure, print, and write the result to --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--model", help="draft model with the target's vocabulary")
    parser.add_argument("--dflash", metavar="FOLDER", help="drafter that reads hidden states")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    suite = load_suite(options.suite)
    prompts = suite.only((), limit=options.limit).prompts
    specs = {"table": "table"}
    if options.dflash:
        specs["dflash"] = f"dflash:{options.dflash}"
    target = paceline.load(TARGET, engine="openvino", drafters=tuple(specs.values()))
    drafter = paceline.load(options.model, drafters=("none",)) if options.model else None
    shared = DrafterResources(
        TARGET, target.engine.vocab_size, shipped=shipped(TARGET), graph=target.files.path
    )
    found = {}
    for temperature in options.temperature or (0.5, 0.8, 1.0):
        how = Sampling(temperature=temperature, seed=SEED)
        counts = {name: Count() for name in names(*specs, *(["model"] if drafter else []))}
        for prompt in prompts:
            asked = list(prompt.messages)
            tokens = target.encode_prompt(asked, target.request({}))[0]
            answer = target.generate(
                asked,
                temperature=temperature,
                top_p=1.0,
                repetition_penalty=1.0,
                frequency_penalty=0.0,
                seed=SEED,
                max_tokens=options.max_tokens,
            )
            text = Text([*tokens, *answer.token_ids], len(tokens))
            for row, taps in computed(target.engine, text):
                text.rows.append(row)
                text.taps.append(taps)
            for kind, spec in specs.items():
                for rule, picks in (("best", Sampling()), ("noise", how)):
                    if f"{kind}, {rule}" in counts:
                        one = drafter_of(spec, shared, picks, text)
                        go_through(text, one, how, counts[f"{kind}, {rule}"])
            if drafter is not None:
                rows = [row for row, _ in computed(drafter.engine, text)]
                for rule, picks in (("best", replace(how, temperature=0.0)), ("noise", how)):
                    go_through(text, of_rows(rows, picks, text), how, counts[f"model, {rule}"])
        found[str(temperature)] = {name: count.result() for name, count in counts.items()}
        print(temperature, json.dumps(found[str(temperature)], indent=1), flush=True)
    result = {
        "command": " ".join(["python", *(Path(each).name for each in sys.argv)]),
        "target": TARGET,
        "engine": target.engine.describe(),
        "model": drafter and {"file": Path(options.model).name, **drafter.engine.describe()},
        "suite": suite.sha256,
        "questions": len(prompts),
        "max_tokens": options.max_tokens,
        "drafts": DRAFTS,
        "temperatures": found,
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def names(*kinds: str) -> list[str]:
    """The drafters and their rules; a table has one."""
    return [
        f"{kind}, {rule}" for kind in kinds for rule in (RULES[:1] if kind == "table" else RULES)
    ]


RULES = ("best", "noise")

Ask = Callable[[int], tuple[Proposal, Row | None]]
"""Length of the context -> the draft after it, and the row that its first token is from."""


def drafter_of(spec: str, shared: DrafterResources, picks: Sampling, text: Text) -> Ask:
    """A drafter that observes the text block by block."""
    request = RequestContext(sampling=picks, prompt_length=text.prompt)
    (drafter,) = create(spec, shared, request)
    watched = None
    if drafter.name == "dflash" and not picks.greedy:
        watched = Watched(picks, text.prompt, shared.vocab_size)
        watched.size = shared.vocab_size
        drafter._sampler = watched  # type: ignore[attr-defined]
    seen = 0

    def ask(length: int) -> tuple[Proposal, Row | None]:
        nonlocal seen
        new = range(seen, length - 1)
        taps = {
            name: np.stack([text.taps[at][name] for at in new]) for name in text.taps[0] if len(new)
        }
        nothing = np.zeros((0, shared.vocab_size), np.float32)
        drafter.observe(
            ComputedBlock(text.tokens[seen : length - 1], seen, len(new), nothing, taps)
        )
        seen = length - 1
        if watched is not None:
            watched.row = None
        proposal = drafter.propose(text.tokens[:length], DRAFTS)
        return proposal, watched.row if watched is not None else None

    return ask


def of_rows(rows: Sequence[Row], picks: Sampling, text: Text) -> Ask:
    """A draft model whose rows are known: a draft is looked at while those before it are right."""
    sampler = DraftSampler(picks, text.prompt, rows[-1].size)

    def ask(length: int) -> tuple[Proposal, Row | None]:
        drafts: list[int] = []
        while len(drafts) < DRAFTS and length + len(drafts) < len(text.tokens):
            at = length + len(drafts)
            drafts.append(sampler.pick(rows[at - 1], at)[0])
            if drafts[-1] != text.tokens[at]:
                break
        return Proposal(drafts, "model"), None if picks.greedy else rows[length - 1]

    return ask


def go_through(text: Text, ask: Ask, how: Sampling, count: Count) -> None:
    """Decode the answer in blocks of up to `DRAFTS` drafts, and count."""
    at = text.prompt + 1
    while at < len(text.tokens):
        proposal, row = ask(at)
        accepted = common_prefix_length(list(proposal.tokens), text.tokens[at:])
        count.steps += 1
        count.tokens += min(accepted + 1, len(text.tokens) - at)
        if len(proposal.tokens):
            count.asked += 1
            count.first += accepted > 0
        if row is not None:
            one, other = (_softmax(each, how.temperature) for each in (text.rows[at - 1], row))
            distance = float(np.abs(one - other).sum()) / 2
            count.least.append((1 - distance) / (1 + distance))
            count.most.append(1 - distance)
        at += accepted + 1


def computed(engine: Engine, text: Text) -> Iterator[tuple[Row, dict[str, Row]]]:
    """Logits, none inside the prompt, and tapped hidden states after each token but the last."""
    sequence, end = engine.open(), len(text.tokens) - 1
    try:
        for at in range(0, end, CHUNK):
            part = text.tokens[at : min(at + CHUNK, end)]
            rows = max(min(at + len(part) - text.prompt + 1, len(part)), 0)
            found = engine.step([(sequence, Block(part, rows, prefill=True))])
            taps = {name: rows.copy() for name, rows in found.taps[0].items()}
            nothing = [np.zeros(0, np.float32)] * (len(part) - rows)
            logits = [*nothing, *found.logits[0].copy()]
            sequence.commit(len(part))
            for each, row in enumerate(logits):
                yield row, {name: rows[each] for name, rows in taps.items()}
    finally:
        sequence.close()


def _softmax(row: Row, temperature: float) -> npt.NDArray[np.float64]:
    weights = np.exp((row - row.max()).astype(np.float64) / temperature)
    found: npt.NDArray[np.float64] = weights / weights.sum()
    return found


if __name__ == "__main__":
    main()
