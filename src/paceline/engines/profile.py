"""Cost profile of an engine: seconds of a call by rows and context, and measured row invariance.

Measured once per model and machine, and stored in a file named by a hash of everything that it
depends on. The `auto` policy uses the costs. `exact` in a result comes from this measurement: it
says which conditions of `invariance.py` held.

Invariants: no first call is timed, because large weights are packed in the first call of any
compiled graph; a profile of too few rounds is not taken for a whole one; and a stored one from
which later calls differ (`profile_watch.py`) is marked. `profile_parts.py` measures in parts.
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
from paceline.storage.progress import QUIET, Progress

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Values of T that are measured; costs between them are interpolated."""

MAX_ROWS = ROWS[-1]
"""Rows of the longest block that a policy may choose."""

_CONTEXT = 192
"""Tokens before the first blocks. llama.cpp's libraries pad keys to 256, and there after 256 to 351
of them a single row has to be two (`engines/row_classes.py`), so that drafts seemed to be free."""
_DEEP_CONTEXT = 4096
_DEEP_ENOUGH = 4
"""Least ratio of the long context to the short one."""
_PREFILL_SECONDS = 4.0
"""Time for the prefill of the long context; if that is too little, only the short one is timed."""
_CHUNKS = (64, 512)
"""Tokens of its first chunk, which shows the rate, and of the others."""

_ROUNDS = (2, 3, 9)
"""Rounds of any profile, of one that is stored, and at most."""

_ROUNDS_SECONDS = 2.0
"""After this no round begins beyond those of a stored profile."""

_THINNING_SECONDS = 3.0
"""If the rounds of a stored profile would take longer, fewer values of T are timed."""

_FEWER_ROWS = (1, 2, 4, 8, 16, 32), (1, 2, 8, 32)
_LIMIT_SECONDS = 60.0
"""After this no round begins beyond those of any profile."""

_FORM = 6
_MARK = ".outdated"


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
    rounds: int = _ROUNDS[1]
    """Times that every T was timed."""
    corrections: Mapping[int, float] = field(default_factory=dict)
    """T -> factor on its seconds, learnt from answers (`profile_watch.py`)."""

    @property
    def cost(self) -> CostTable:
        """Seconds per call by T, and by context if two were measured, as corrected."""
        further = self.deep_context - self.context
        factor = self.corrections.get
        return CostTable(
            {rows: seconds * factor(rows, 1.0) for rows, seconds in self.seconds.items()},
            self.context,
            {
                rows: max(seconds - self.seconds[rows], 0.0) * factor(rows, 1.0) / further
                for rows, seconds in self.deep_seconds.items()
            },
        )


def warm_up(
    engine: Engine, rows: Sequence[int], update: Callable[[int], object] = lambda _: None
) -> None:
    """Make one call per number of rows, if it fits; `update` gets the number of calls so far.

    Large weights are packed for the processor in the first call of a compiled graph.
    """
    room = min(engine.context_length, engine.free_slots) - engine.min_rows
    with contextlib.closing(engine.open()) as sequence:
        for done, count in enumerate(rows, start=1):
            if count <= room:
                engine.step([(sequence, Block([0] * count, count))])
            update(done)


def measure_profile(engine: Engine, rows: Sequence[int] = ROWS) -> CostProfile:
    """Time blocks of every T in turns and compare their logits, at a short and at a long context.

    Then compare rows under the other conditions of `invariance.py`.
    """
    profile = _timed(engine, rows)
    compared = dict(profile.compared)
    for name, comparison in measure_invariance(engine).items():
        compared[name] = compared.get(name, Compared()) + comparison
    blocks = compared[BLOCK_LENGTH]
    return replace(
        profile,
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
    with contextlib.closing(engine.open()) as sequence:
        _prefill(engine, sequence, tokens[:context])
        near = _Times(engine, sequence, tokens[context : context + longest], rows)
        if not _prefill_deep(engine, sequence, tokens[:deep], _DEEP_ENOUGH * context):
            return _profile(near, context)
        deep = sequence.length
        block = tokens[deep : deep + longest]
        far = _Times(engine, sequence, block, list(near.seconds), fewer=False)
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
        min(near.rounds, far.rounds) if far else near.rounds,
    )


def _prefill(engine: Engine, sequence: KVSequence, tokens: list[int]) -> None:
    engine.step([(sequence, Block(tokens, 0, prefill=True))])
    sequence.commit(len(tokens))


def _prefill_deep(engine: Engine, sequence: KVSequence, tokens: list[int], least: int) -> bool:
    """Prefill what is missing of `tokens`, as far as time allows; False if less than `least`."""
    begin, started = sequence.length, perf_counter()
    while sequence.length < len(tokens) >= least:
        chunk = _CHUNKS[sequence.length > begin]
        _prefill(engine, sequence, tokens[sequence.length :][:chunk])
        elapsed = perf_counter() - started
        left = _PREFILL_SECONDS - elapsed
        expected = (sequence.length - begin) / elapsed * left
        if left < 0 or sequence.length + expected < least:
            break
    return sequence.length >= least


class _Times:
    """Seconds of blocks of every T after the committed context, and whether their rows are equal.

    Every T is compared, in a round that is not timed. If calls take long, only some of the T are
    timed more than once, and the others are left out, unless `fewer` is false.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: KVSequence,
        block: list[int],
        rows: Sequence[int],
        *,
        fewer: bool = True,
    ) -> None:
        reference = engine.step([(sequence, Block(block, len(block)))]).logits[0].copy()
        self.compared = Compared()
        self.seconds: dict[int, float]
        """T -> least seconds of a call."""
        for count in rows:  # not timed: a first call may pack weights
            logits = engine.step([(sequence, Block(block[:count], count))]).logits[0]
            self.compared += compare(logits, reference[:count])
        times: dict[int, list[float]] = {count: [] for count in rows}
        started = perf_counter()
        least, stored, most = _ROUNDS
        for self.rounds in range(1, most + 1):
            for count, samples in times.items():
                samples.append(engine.step([(sequence, Block(block[:count], count))]).seconds)
            if self.rounds == 1 and fewer:
                times = {count: times[count] for count in _few(times)}
            elapsed = perf_counter() - started
            if self.rounds >= least and elapsed > _LIMIT_SECONDS:
                break
            if self.rounds >= stored and elapsed > _ROUNDS_SECONDS:
                break
        # Other processes on the machine only add time.
        self.seconds = {count: min(times[count]) for count in times}


def _few(times: Mapping[int, list[float]]) -> list[int]:
    """Values of T to time: all, or fewer if calls take long."""
    rows, last = [*times], max(times)
    for fewer in _FEWER_ROWS:
        if sum(min(times[count]) for count in rows) * _ROUNDS[1] <= _THINNING_SECONDS:
            break
        rows = [count for count in rows if count in fewer or count == last]
    return rows


def load_profile(
    engine: Engine,
    fingerprint: str,
    folder: Path,
    *,
    again: bool = False,
    progress: Progress = QUIET,
) -> CostProfile:
    """The profile stored in `folder` for this engine, model and machine; measured if missing.

    Args:
        engine: the engine with its model.
        fingerprint: identity of the model's weights.
        folder: folder of stored profiles; created when needed.
        again: measure even if a profile is stored.
        progress: shows a measurement, which takes seconds, and gets a line if it is not stored.
    """
    depends = _depends(engine, fingerprint)
    path = _path(depends, folder)
    stored, outdated = known_profile(engine, fingerprint, folder)
    reason = f"again: {outdated}" if outdated else "once for this model"
    if stored and is_whole(stored, engine) and not (again or outdated):
        return stored
    with progress.task(f"measuring this machine, {reason}"):
        profile = measure_profile(engine)
    if profile.rounds < _ROUNDS[1]:
        progress.say(
            f"this machine is too slow or too busy to measure (every call was timed "
            f"{profile.rounds} times, {_ROUNDS[1]} are needed): the cost profile is not kept; "
            "measure again with `paceline plan --again`"
        )
    else:
        _write(path, profile, depends)
    return profile


def known_profile(engine: Engine, fingerprint: str, folder: Path) -> tuple[CostProfile | None, str]:
    """The stored profile, whole or in part, and why it is outdated; None: there is none."""
    path = _path(_depends(engine, fingerprint), folder)
    return _stored(path), _mark(path)


def is_whole(profile: CostProfile, engine: Engine) -> bool:
    """Whether a profile has all rounds, and every condition that fits into the free slots."""
    whole = len(profile.compared) == len(CONDITIONS) or not has_room(engine)
    return profile.rounds >= _ROUNDS[1] and whole


def store_profile(
    engine: Engine, fingerprint: str, folder: Path, profile: CostProfile, *, measured: bool = True
) -> None:
    """Store a profile, whole or in part, in place of another one.

    One that was `measured` now is not outdated; another stays marked if it was.
    """
    depends = _depends(engine, fingerprint)
    _write(_path(depends, folder), profile, depends, measured=measured)


def unmark(engine: Engine, fingerprint: str, folder: Path) -> None:
    """Take back `mark_outdated`."""
    path = _path(_depends(engine, fingerprint), folder)
    with contextlib.suppress(OSError):
        path.with_suffix(_MARK).unlink(missing_ok=True)


def mark_outdated(engine: Engine, fingerprint: str, folder: Path, reason: str) -> bool:
    """Have `load_profile` measure again, and say `reason`; False if it will do so anyway."""
    path = _path(_depends(engine, fingerprint), folder)
    if _mark(path) or not path.is_file():
        return False
    with contextlib.suppress(OSError):  # then a later process notices it again
        path.with_suffix(_MARK).write_text(reason, encoding="utf-8")
    return True


def _depends(engine: Engine, fingerprint: str) -> dict[str, str]:
    return {**engine.describe(), "model": fingerprint, "form": str(_FORM)}


def _path(depends: Mapping[str, str], folder: Path) -> Path:
    name = sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]
    return folder / f"{name}.json"


def _mark(path: Path) -> str:
    """Why a stored profile is outdated; empty if it is not."""
    try:
        return path.with_suffix(_MARK).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def stored_profiles(fingerprint: str, folder: Path) -> list[tuple[dict[str, str], CostProfile]]:
    """The profiles of a model in `folder`, as (what it depends on, profile).

    Only those of this version's file format; none if the folder does not exist.
    """
    profiles = []
    for path in sorted(folder.glob("*.json")):
        profile = _stored(path)
        if profile is not None:
            depends: dict[str, str] = json.loads(path.read_text(encoding="utf-8")).get(
                "depends_on", {}
            )
            if (depends.get("model"), depends.get("form")) == (fingerprint, str(_FORM)):
                profiles.append((depends, profile))
    return profiles


def _stored(path: Path) -> CostProfile | None:
    """A stored profile; None if it is missing or damaged."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        seconds = {int(rows): float(cost) for rows, cost in content["seconds"].items()}
        profile = CostProfile(
            seconds,
            bool(content["row_invariant"]),
            float(content["largest_difference"]),
            int(content["context"]),
            {int(rows): float(cost) for rows, cost in content["deep_seconds"].items()},
            int(content["deep_context"]),
            {name: Compared(**content["compared"][name]) for name in content["compared"]},
            int(content["rounds"]),
            {int(rows): float(by) for rows, by in content.get("corrections", {}).items()},
        )
        _ = profile.cost
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return profile


def _write(
    path: Path, profile: CostProfile, depends: dict[str, str], *, measured: bool = True
) -> None:
    """Store a profile; if that fails, the next run measures again."""
    content = {
        "depends_on": depends,
        "seconds": profile.seconds,
        "row_invariant": profile.row_invariant,
        "largest_difference": profile.largest_difference,
        "context": profile.context,
        "deep_seconds": profile.deep_seconds,
        "deep_context": profile.deep_context,
        "compared": {name: asdict(comparison) for name, comparison in profile.compared.items()},
        "rounds": profile.rounds,
        "corrections": profile.corrections,
    }
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content, indent=1), encoding="utf-8")
        beside.replace(path)
        if measured:
            path.with_suffix(_MARK).unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
