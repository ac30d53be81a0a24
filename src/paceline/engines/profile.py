"""What an engine's calls cost here, and whether its rows depend on how they are computed.

Measured once for a model on a machine, and kept in a small file named after everything the answer
depends on. The `auto` policy draws on the costs; `exact` in a result is this measurement, not a
promise: it says which conditions of `invariance.py` were found to hold.
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
"""The T that are measured; costs between them are interpolated."""

MAX_ROWS = ROWS[-1]
"""The longest block that a policy may ask for."""

_CONTEXT = 256
_DEEP_CONTEXT = 4096
_DEEP_ENOUGH = 4
"""How many times longer the long context is at least."""
_READING_SECONDS = 5.0
_CHUNK = 512
_ROUNDS = (3, 9)
_ROUNDS_SECONDS = 2.0
_PATIENCE_SECONDS = 10.0
_FORM = 4


@dataclass(frozen=True, slots=True)
class CostProfile:
    """How an engine with a model behaves on this machine."""

    seconds: dict[int, float]
    """T -> least seconds of a call with T rows of one sequence."""
    row_invariant: bool
    """Whether the same position gave bitwise the same logits in blocks of every T measured."""
    largest_difference: float
    """The largest difference between logits of one position; 0.0 when row-invariant."""
    context: int
    """Tokens that stood before the blocks."""
    deep_seconds: dict[int, float] = field(default_factory=dict)
    """The same behind a longer context; empty where the engine has no room for one, or takes long
    to read it."""
    deep_context: int = 0
    compared: Mapping[str, Compared] = field(default_factory=dict)
    """Condition -> what was compared; see `invariance.py`. Where there was no room for a second
    sequence, a condition that needs one is not there."""

    @property
    def cost(self) -> CostTable:
        """Seconds per call by T, and by context where two were measured."""
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
    """Time blocks of each T behind the same context, in turns, and compare their logits.

    Once after a short context, and once after a long one. Then rows are compared under the other
    conditions of `invariance.py`.
    """
    found = _timed(engine, rows)
    return _and_compared(found, measure_invariance(engine))


def _and_compared(found: CostProfile, further: Mapping[str, Compared]) -> CostProfile:
    compared = dict(found.compared)
    for name, each in further.items():
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
        _read(engine, sequence, tokens[:context])
        if (perf_counter() - started) * _DEEP_ENOUGH > _READING_SECONDS:
            deep = context
        near = _Times(engine, sequence, tokens[context : context + longest], rows)
        started = perf_counter()
        while sequence.length < deep and perf_counter() - started < _READING_SECONDS:
            _read(engine, sequence, tokens[sequence.length : deep][:_CHUNK])
        deep = sequence.length
        if deep < _DEEP_ENOUGH * context:
            return _measurement(near, context)
        far = _Times(engine, sequence, tokens[deep : deep + longest], rows)
    finally:
        sequence.close()
    return _measurement(near, context, far, deep)


def _measurement(
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


def _read(engine: Engine, sequence: KVSequence, tokens: list[int]) -> None:
    engine.step([(sequence, Block(tokens, 0, prefill=True))])
    sequence.commit(len(tokens))


class _Times:
    """What blocks of each T take behind what a sequence holds, and whether their rows agree."""

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
        # Other work on the machine only ever adds time.
        self.seconds = {count: min(times[count]) for count in rows}


def load_profile(
    engine: Engine,
    fingerprint: str,
    folder: Path,
    *,
    again: bool = False,
    before: Callable[[], object] = lambda: None,
) -> CostProfile:
    """The measurement kept in `folder` for this engine, model and machine; made when not there.

    Args:
        engine: the engine with its model.
        fingerprint: identity of the model's weights.
        folder: where measurements are kept; created when needed.
        again: measure even though there is one.
        before: called when there is something to measure, which takes seconds.
    """
    depends = {**engine.describe(), "model": fingerprint, "form": str(_FORM)}
    name = sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]
    path = folder / f"{name}.json"
    if not again:
        kept = _kept(path)
        if kept is not None and (len(kept.compared) == len(CONDITIONS) or not has_room(engine)):
            return kept
    before()
    measurement = measure_profile(engine)
    _write(path, measurement, depends)
    return measurement


def stored_profiles(fingerprint: str, folder: Path) -> list[tuple[dict[str, str], CostProfile]]:
    """The measurements of a model in `folder`: what each depends on, and what was found.

    Only those of this version's form; none where the folder is not there.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        measurement = _kept(path)
        if measurement is not None:
            depends: dict[str, str] = json.loads(path.read_text()).get("depends_on", {})
            if (depends.get("model"), depends.get("form")) == (fingerprint, str(_FORM)):
                found.append((depends, measurement))
    return found


def _kept(path: Path) -> CostProfile | None:
    """A kept measurement; None when there is none, or none that can be read: it is made again."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        seconds = {int(rows): float(cost) for rows, cost in found["seconds"].items()}
        measurement = CostProfile(
            seconds,
            bool(found["row_invariant"]),
            float(found["largest_difference"]),
            int(found["context"]),
            {int(rows): float(cost) for rows, cost in found["deep_seconds"].items()},
            int(found["deep_context"]),
            {name: Compared(**found["compared"][name]) for name in found["compared"]},
        )
        _ = measurement.cost
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return measurement


def _write(path: Path, measurement: CostProfile, depends: dict[str, str]) -> None:
    """Keep a measurement; one that cannot be kept is made again next time."""
    content = {
        "depends_on": depends,
        "seconds": measurement.seconds,
        "row_invariant": measurement.row_invariant,
        "largest_difference": measurement.largest_difference,
        "context": measurement.context,
        "deep_seconds": measurement.deep_seconds,
        "deep_context": measurement.deep_context,
        "compared": {name: asdict(each) for name, each in measurement.compared.items()},
    }
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content, indent=1))
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
