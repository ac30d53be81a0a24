"""What a head brings to `auto`: recorded answers, an acceptance, and what calls cost.

    python benchmarks/head_policy.py [--acceptance 0.75] [--kind "multi-turn conversation"]

The head is right with the given probability after each token, and knows how sure it is of each. A
draft costs its weights' share of a call of as many rows; token by token, of as many calls. Speed is
over plain decoding, all answers together: `auto` with text drafters alone, and beside the head.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.decoding.auto import Acceptance, Auto
from paceline.decoding.costs import CostTable
from paceline.decoding.types import Drafter, Proposal
from paceline.drafters import DrafterResources, DrafterSpec, RequestContext, create
from paceline.drafters.heads import DraftCost
from paceline_lab.simulate.replay import Recording, _replay, costs_by_context

TEXTS = Path(__file__).parent / "results" / "spec-bench-sampled.json"

COSTS = {
    "ik_llama.cpp, 2 threads": {1: 46, 2: 73, 3: 90, 4: 106, 6: 132, 8: 177, 16: 298},
    "OpenVINO, 2 threads": {1: 51, 2: 55, 4: 68, 8: 91, 16: 141},
    "computed, 8 cores": {1: 25, 2: 26, 4: 28, 8: 52, 16: 92},
}
"""Milliseconds of a call of a 1.7B in 4 bits by rows. Computed: weights are read in 25 ms, and a
row takes a quarter of what it does with two threads."""

SHARES = {"1.7B": (0.36, 0.21), "8B": (0.22, 0.11)}
"""Shares of the target's weights that a draft reads: five layers (DFlash) or one (MTP, EAGLE-3),
and the head."""

FORMS = {"block of 8": 7, "block of 16": 15, "chain": 4}
"""Most tokens of a draft."""


class Head(Drafter):
    """Knows the text, and is right as often as it says."""

    name = "head"

    def __init__(
        self, text: Sequence[int], mean: float, seconds: Sequence[float], cost: DraftCost
    ) -> None:
        """`seconds` are those of a draft of as many tokens, up to the longest; `cost` is learnt."""
        self._text, self._mean, self._seconds, self._cost = text, mean, seconds, cost
        self._rng = np.random.default_rng(len(text))
        self.taken = 0.0

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """What follows, with errors."""
        count = min(limit, len(self._seconds) - 1)
        sure = self._rng.beta(3 * self._mean, 3 * (1 - self._mean), count)
        after = [*self._text[len(context) :], *[-1] * count]
        right = self._rng.random(count) < sure
        self.taken += self._seconds[count]
        self._cost.observe(self._seconds[count], 0)
        tokens = [token if ok else -1 for token, ok in zip(after, right, strict=False)]
        return Proposal(tokens, self.name, 0, sure.tolist())

    def cost(self, limit: int) -> float:
        """A running mean, which all answers share."""
        return self._cost.seconds


def speeds(
    recordings: Sequence[Recording], table: CostTable, mean: float, taken: list[float]
) -> list[float]:
    """Over plain: without the head, with it, and with it in the answer that gains least."""
    found = []
    for is_there in (False, True):
        acceptance, cost, plain, seconds = Acceptance(), DraftCost(), [], []
        for one in recordings:
            acceptance = acceptance.discounted()
            policy = Auto(16, table, acceptance, len(one.prompt))
            context = RequestContext(prompt_length=len(one.prompt))
            drafters = [*create(DrafterSpec.parse("ngram+suffix"), DrafterResources(), context)]
            head = Head([*one.prompt, *one.answer], mean, taken, cost)
            result = _replay(
                one, [*drafters, head][: None if is_there else -1], policy, costs_by_context(table)
            )
            plain.append(result.plain_seconds)
            seconds.append(result.seconds + head.taken)
        found += [sum(plain) / sum(seconds)]
    return [*found, min(np.array(plain) / seconds)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--acceptance", type=float, default=0.75)
    parser.add_argument("--kind", default="multi-turn conversation")
    options = parser.parse_args()
    rows = json.loads(TEXTS.read_bytes())["rows"]
    recordings = [
        # The prompts were not recorded: tokens that occur nowhere else stand for them.
        Recording(
            row["case"], row["kind"], range(-1 - facts["prompt_tokens"], -1), facts["token_ids"]
        )
        for row in rows
        if row["contender"] == "plain" and row["kind"] == options.kind
        for facts in [row["facts"]]
        if facts["tokens"] > 1
    ]
    print(f"{len(recordings)} answers; text drafters, with a head: all, the least")
    for name, costs in COSTS.items():
        table = CostTable({rows: ms / 1e3 for rows, ms in costs.items()})
        for size, (block, chain) in SHARES.items():
            for form, most in FORMS.items():
                chained = form == "chain"
                counts = range(1, most + 1)
                taken = [chain * n * table(1) if chained else block * table(n + 1) for n in counts]
                alone, both, least = speeds(recordings, table, options.acceptance, [0.0, *taken])
                print(
                    f"{name:25}{size:6}{form:13}{alone:.2f} {both:.2f} {least:.2f}, "
                    f"{both / alone:.2f} of text drafters"
                )


if __name__ == "__main__":
    main()
