"""The prompts of a suite that a benchmark answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import InvalidRequest
from paceline.verify.suite import Suite, load_suite


def chosen_prompts(
    path: Path | None,
    kinds: Sequence[str] = (),
    per_kind: int | None = None,
    limit: int | None = None,
) -> Suite:
    """A suite's prompts of some kinds (all if empty), `per_kind` per kind; the hash is the file's.

    `limit` is the number of prompts in all: the same number of each kind (one more of the first
    kinds if it does not divide). Of n prompts of a kind, prompt i of k is at floor(i n / k).
    Raises InvalidRequest as `load_suite`, or if there is no such kind.
    """
    suite = load_suite(path)
    known = list(dict.fromkeys(prompt.kind for prompt in suite.prompts))
    for kind in kinds:
        if kind not in known:
            raise InvalidRequest(f"no prompt is of kind {kind!r}; expected {', '.join(known)}")
    groups = [
        [prompt for prompt in suite.prompts if prompt.kind == kind][:per_kind]
        for kind in known
        if not kinds or kind in kinds
    ]
    if limit is not None:
        counts = _shares([len(group) for group in groups], limit)
        groups = [
            [group[i * len(group) // count] for i in range(count)]
            for group, count in zip(groups, counts, strict=True)
        ]
    return replace(suite, prompts=[prompt for group in groups for prompt in group])


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """Numbers that share `total` equally among groups of these sizes; all of a smaller group."""
    shares = [0] * len(sizes)
    left = min(total, sum(sizes))
    while left:
        open_groups = [at for at, size in enumerate(sizes) if shares[at] < size]
        for at in open_groups[:left]:
            shares[at] += 1
        left -= len(open_groups[:left])
    return shares
