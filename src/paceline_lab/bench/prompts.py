"""Selects a benchmark's prompts from a suite."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.verify.suite import Suite, load_suite


def chosen_prompts(path: Path | None, limit: int | None = None) -> Suite:
    """Return a suite's prompts, or `limit` of them; the hash is that of the file.

    Each kind has the same number of prompts (the first kinds have one more if needed). Of n prompts
    of a kind, prompt i of k is at floor(i n / k). Raises InvalidRequest as `load_suite` does.
    """
    suite = load_suite(path)
    if limit is None:
        return suite
    kinds = dict.fromkeys(prompt.kind for prompt in suite.prompts)
    groups = [[prompt for prompt in suite.prompts if prompt.kind == kind] for kind in kinds]
    counts = _shares([len(group) for group in groups], limit)
    chosen = [
        group[place * len(group) // count]
        for group, count in zip(groups, counts, strict=True)
        for place in range(count)
    ]
    return replace(suite, prompts=chosen)


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """Divide `total` equally among groups of these sizes; small groups are used up."""
    shares = [0] * len(sizes)
    left = min(total, sum(sizes))
    while left:
        open_groups = [at for at, size in enumerate(sizes) if shares[at] < size]
        for at in open_groups[:left]:
            shares[at] += 1
        left -= len(open_groups[:left])
    return shares
