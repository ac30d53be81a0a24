"""Whether `auto` gains by a new table: held-out answers replayed with and without it.

The replay takes the steps that real requests would, and the costs of calls are those measured on
this machine (`paceline_lab/simulate`). What reads hidden states is left out of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.decoding.costs import CostTable
from paceline.drafters import DrafterResources, Table
from paceline.models import ModelFiles
from paceline.runtime.drafting import Drafting
from paceline.runtime.request import check
from paceline_lab.learn.folder import Example
from paceline_lab.learn.variety import HELD_OUT, UNSEEN, part_of
from paceline_lab.simulate.replay import Recording, simulate
from paceline_lab.simulate.report import Total, total_of

MIN_GAIN = 1.01
"""Speed of `auto` with a new drafter over that without, from which the drafter is installed."""

LEAST_ANSWERS = 8
"""Of a set; fewer say too little."""

_MOST = 100
"""Answers of a set that are replayed."""

_SIMULATED = ("table",)
"""Drafters of a model that a recorded text can be replayed with."""


@dataclass(frozen=True, slots=True)
class Sets:
    """Answers that nothing is learnt from."""

    held_out: Sequence[Example]
    """To questions of the kinds that are learnt from."""
    unseen: Sequence[Example]
    """To questions about topics that are not."""

    @property
    def named(self) -> Mapping[str, Sequence[Example]]:
        """The sets, with a name for people."""
        return {"held_out": self.held_out, " and ".join(UNSEEN): self.unseen}


@dataclass(frozen=True, slots=True)
class Comparison:
    """`auto` on one set, with the drafter and without."""

    answers: int
    tokens_per_step: float
    tokens_per_step_before: float
    speed: float
    """Over plain decoding, by the costs of calls: geometric mean of the answers."""
    speed_before: float

    @property
    def gain(self) -> float:
        """Speed with the drafter over that without."""
        return self.speed / self.speed_before

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {**asdict(self), "gain": self.gain}


def divided(examples: Sequence[Example]) -> tuple[list[Example], Sets]:
    """Examples to learn from, and those to evaluate on; loops are in neither."""
    parts: dict[str, list[Example]] = {}
    for example in examples:
        if len(example.answer.answer) > 1 and not example.loops:
            parts.setdefault(part_of(example.texts), []).append(example)
    unseen = [example for topic in UNSEEN for example in parts.pop(topic, [])]
    held_out = parts.pop(HELD_OUT, [])
    return [example for part in parts.values() for example in part], Sets(held_out, unseen)


def compare_tables(
    files: ModelFiles, table: Path, vocab_size: int, cost: CostTable, sets: Sets
) -> dict[str, Comparison]:
    """Compare `auto` with `table` and `auto` as it is now, set by set; empty sets are left out.

    Args:
        files: the model as it is used.
        table: the folder of the new table.
        vocab_size: of the model.
        cost: seconds of its calls.
        sets: answers to replay.

    Raises ModelError if a table cannot be read.
    """
    before = _resources(Drafting(files).resources, vocab_size)
    after = _resources(Drafting(files).resources, vocab_size, table)
    comparisons = {}
    for name, examples in sets.named.items():
        recordings = [_recording(example) for example in examples[:_MOST]]
        if recordings:
            old, new = (_replayed(recordings, cost, shared) for shared in (before, after))
            comparisons[name] = Comparison(
                len(recordings), new.ideal, old.ideal, new.mean(), old.mean()
            )
    return comparisons


def is_gain(comparisons: Mapping[str, Comparison], sets: Sets) -> bool:
    """Whether a drafter is worth installing: it gains on every set, and none is too small."""
    complete = len(comparisons) == len(sets.named)
    return complete and all(
        one.gain >= MIN_GAIN and one.answers >= LEAST_ANSWERS for one in comparisons.values()
    )


def _resources(
    shared: DrafterResources, vocab_size: int, table: Path | None = None
) -> DrafterResources:
    folders = {kind: path for kind, path in shared.shipped.items() if kind in _SIMULATED}
    shared.shipped = folders if table is None else {**folders, "table": table}
    if "table" in shared.shipped:
        shared.tables[""] = Table.open(shared.shipped["table"], vocab_size)
    return shared


def _replayed(recordings: Sequence[Recording], cost: CostTable, shared: DrafterResources) -> Total:
    return total_of(simulate(recordings, check({"drafter": "auto"}), cost, shared))


def _recording(example: Example) -> Recording:
    answer = example.answer
    limit = len(answer.answer) + 1 if answer.finish == "stop" else None
    return Recording(str(answer.number), example.kind, answer.prompt, answer.answer, limit)
