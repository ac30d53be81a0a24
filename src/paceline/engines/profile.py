"""Cost profile of an engine: seconds of a call by rows and context, and measured row invariance.

Measured once per model and machine, and stored in a file named by a hash of everything that it
depends on. The `auto` policy uses the costs. `exact` in a result comes from this measurement: it
says which conditions of `invariance.py` held.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from paceline.decoding.costs import CostTable
from paceline.decoding.types import Block
from paceline.engines.base import Engine, KVSequence
from paceline.engines.invariance import (
    BLOCK_LENGTH,
    CONDITIONS,
    Compared,
    compare,
    has_room,
    measure_invariance,
)

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Values of T that are measured; costs between them are interpolated."""

MAX_ROWS = ROWS[-1]
"""Rows of the longest block that a policy may choose."""

_CONTEXT = 256
_DEEP_CONTEXT = 4096
_DEEP_ENOUGH = 4
"""Least ratio of the long context to the short one."""
_PREFILL_SECONDS = 5.0
_CHUNK = 512
_ROUNDS = (3, 9)
_ROUNDS_SECONDS = 2.0
_PATIENCE_SECONDS = 10.0
_FORM = 4


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Costs and row invariance of an engine with a model on this machine."""

    seconds: dict[int, float]
    """T -> least seconds of a call with T rows of one sequence."""
    row_invariant: bool
    """Whether a position's logits were bitwise equal in blocks of every measured T."""
    largest_difference: float
    """The largest difference between logits of one position; 0.0 when row-invariant."""
    context: int
    """Tokens before the blocks."""
    deep_seconds: dict[int, float] = field(default_factory=dict)
    """The same at a longer context; empty if it does not fit or its prefill takes too long."""
    deep_context: int = 0
    compared: Mapping[str, Compared] = field(default_factory=dict)
    """Condition -> comparison; see `invariance.py`. If the cache had no room for a second sequence,
    the conditions that need one are missing."""

    @property
    def cost(self) -> CostTable:
        """Seconds per call by T, and by context if two were measured."""
        further = self.deep_context - self.context
        return CostTable(
            self.seconds,
            self.context,
            {
                rows: max(seconds - self.seconds[rows], 0.0) / further
                for rows, seconds in self.deep_seconds.items()
            },
        )


def measure_profile(engine: Engine, rows: Sequence[int] = ROWS) -> CostProfile:
    """Time blocks of each T in turns and compare their logits, at a short and at a long context.

    Then compare rows under the other conditions of `invariance.py`.
    """
    found = _timed(engine, rows)
    compared = dict(found.compared)
    for name, each in measure_invariance(engine).items():
        compared[name] = compared.get(name, Compared()) + each
    blocks = compared[BLOCK_LENGTH]
    return replace(
        found,
        row_invariant=blocks.holds,
        largest_difference=blocks.largest_difference,
        compared=compared,
    )


def _timed(engine: Engine, rows: Sequence[int]) -> CostProfile:
    room = min(engine.context_length, engine.free_slots) - engine.min_rows
    rows = [count for count in rows if count <= room // 2] or [1]
    longest = max(rows)
    context = max(min(_CONTEXT, room - longest), 1)
    deep = min(_DEEP_CONTEXT, room - longest)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, engine.vocab_size, max(deep, context) + longest).tolist()
    sequence = engine.open()
    try:
        started = perf_counter()
        _prefill(engine, sequence, tokens[:context])
        if (perf_counter() - started) * _DEEP_ENOUGH > _PREFILL_SECONDS:
            deep = context
        near = _Times(engine, sequence, tokens[context : context + longest], rows)
        started = perf_counter()
        while sequence.length < deep and perf_counter() - started < _PREFILL_SECONDS:
            _prefill(engine, sequence, tokens[sequence.length : deep][:_CHUNK])
        deep = sequence.length
        if deep < _DEEP_ENOUGH * context:
            return _profile(near, context)
        far = _Times(engine, sequence, tokens[deep : deep + longest], rows)
    finally:
        sequence.close()
    return _profile(near, context, far, deep)


def _profile(
    near: "_Times", context: int, far: "_Times | None" = None, deep: int = 0
) -> CostProfile:
    compared = near.compared + far.compared if far else near.compared
    return CostProfile(
        near.seconds,
        compared.holds,
        compared.largest_difference,
        context,
        far.seconds if far else {},
        deep if far else 0,
        {BLOCK_LENGTH: compared},
    )


def _prefill(engine: Engine, sequence: KVSequence, tokens: list[int]) -> None:
    engine.step([(sequence, Block(tokens, 0, prefill=True))])
    sequence.commit(len(tokens))


class _Times:
    """Seconds of blocks of each T after the committed context, and whether their rows are equal."""

    def __init__(
        self, engine: Engine, sequence: KVSequence, block: list[int], rows: Sequence[int]
    ) -> None:
        reference = engine.step([(sequence, Block(block, len(block)))]).logits[0].copy()
        self.compared = Compared()
        times: dict[int, list[float]] = {count: [] for count in rows}
        started = perf_counter()
        for done in range(_ROUNDS[1]):
            for count in rows:
                result = engine.step([(sequence, Block(block[:count], count))])
                times[count].append(result.seconds)
                if done == 0:
                    self.compared += compare(result.logits[0], reference[:count])
            taken = perf_counter() - started
            if taken > (_ROUNDS_SECONDS if done + 1 >= _ROUNDS[0] else _PATIENCE_SECONDS):
                break
        # Other processes on the machine only add time.
        self.seconds = {count: min(times[count]) for count in rows}


def load_profile(
    engine: Engine,
    fingerprint: str,
    folder: Path,
    *,
    again: bool = False,
    before: Callable[[], object] = lambda: None,
) -> CostProfile:
    """The profile stored in `folder` for this engine, model and machine; measured if missing.

    Args:
        engine: the engine with its model.
        fingerprint: identity of the model's weights.
        folder: folder of stored profiles; created when needed.
        again: measure even if a profile is stored.
        before: called before a measurement, which takes seconds.
    """
    depends = {**engine.describe(), "model": fingerprint, "form": str(_FORM)}
    name = sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]
    path = folder / f"{name}.json"
    if not again:
        stored = _stored(path)
        if stored and (len(stored.compared) == len(CONDITIONS) or not has_room(engine)):
            return stored
    before()
    profile = measure_profile(engine)
    _write(path, profile, depends)
    return profile


def stored_profiles(fingerprint: str, folder: Path) -> list[tuple[dict[str, str], CostProfile]]:
    """The profiles of a model in `folder`, each with what it depends on.

    Only those of this version's file format; none if the folder does not exist.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        profile = _stored(path)
        if profile is not None:
            depends: dict[str, str] = json.loads(path.read_text()).get("depends_on", {})
            if (depends.get("model"), depends.get("form")) == (fingerprint, str(_FORM)):
                found.append((depends, profile))
    return found


def _stored(path: Path) -> CostProfile | None:
    """A stored profile; None if it is missing or damaged."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        seconds = {int(rows): float(cost) for rows, cost in found["seconds"].items()}
        profile = CostProfile(
            seconds,
            bool(found["row_invariant"]),
            float(found["largest_difference"]),
            int(found["context"]),
            {int(rows): float(cost) for rows, cost in found["deep_seconds"].items()},
            int(found["deep_context"]),
            {name: Compared(**found["compared"][name]) for name in found["compared"]},
        )
        _ = profile.cost
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return profile


def _write(path: Path, profile: CostProfile, depends: dict[str, str]) -> None:
    """Store a profile; if that fails, the next run measures again."""
    content = {
        "depends_on": depends,
        "seconds": profile.seconds,
        "row_invariant": profile.row_invariant,
        "largest_difference": profile.largest_difference,
        "context": profile.context,
        "deep_seconds": profile.deep_seconds,
        "deep_context": profile.deep_context,
        "compared": {name: asdict(each) for name, each in profile.compared.items()},
    }
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content, indent=1))
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
