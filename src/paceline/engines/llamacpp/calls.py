"""Calls that measure which rows a model's calls may have."""

from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np

from paceline.decoding.types import Logits
from paceline.engines.exact import LONGEST, measure_rules
from paceline.engines.llamacpp.binding import CallLimits, ContextSettings, Device, State
from paceline.engines.llamacpp.contexts import whole
from paceline.engines.llamacpp.native import NativeModel
from paceline.engines.llamacpp.sequence import call
from paceline.engines.rows import RowRange, RowRules

MOST_ROWS = 256

UNMEASURED = RowRules(RowRange(1, 16), RowRange(1, MOST_ROWS))
"""Without padding, where `min_rows` is 1: a row's bits depend on its call."""

ALONE = RowRules(RowRange(1, 1), RowRange(1, 1))
"""The last resort: no call has a second row on which a row's bits could depend."""

CANDIDATES = (
    RowRules(RowRange(2, 16), RowRange(2, 256)),
    RowRules(RowRange(2, 16), RowRange(32, 256)),
    RowRules(RowRange(2, 16), RowRange(64, 256)),
    RowRules(RowRange(2, 7), RowRange(8, 256)),
    RowRules(RowRange(2, 7), RowRange(64, 256)),
    RowRules(RowRange(2, 16), RowRange(2, 16)),
    RowRules(RowRange(2, 7), RowRange(2, 7)),
    RowRules(RowRange(1, 1), RowRange(2, 256)),
    RowRules(RowRange(1, 1), RowRange(32, 256)),
    RowRules(RowRange(1, 1), RowRange(64, 256)),
)
"""By ascending cost. Two read prompts as answers: for mixtures of experts, in which an expert gets
any number of a call's rows. With the last three each row of an answer runs alone, as in plain
decoding, and drafts gain nothing."""

_PADDED = 2
"""Rows to which a call may be padded where it may not cross some positions."""

ROLLED_BACK = (
    RowRules(RowRange(2, 16), RowRange(2, 256)),
    RowRules(RowRange(2, 16), RowRange(8, 256)),
    RowRules(RowRange(2, 7), RowRange(8, 256)),
    RowRules(RowRange(2, 16), RowRange(2, 16)),
    RowRules(RowRange(2, 7), RowRange(2, 7)),
    RowRules(RowRange(1, 1), RowRange(2, 256)),
    RowRules(RowRange(1, 1), RowRange(8, 256)),
)
"""For recurrent layers, whose states are copied once per row that may be dropped."""


ON_DEVICE = ((2, 16), (2, 8), (3, 8), (2, 4), (3, 4), (5, 8), (9, 16), (1, 1))
"""Rows of an answer's calls where layers are on a device, by ascending cost. A GPU's kernels are
for a few numbers of rows each: those of a CUDA build were {1}, {2..4}, {5..8}, {9..16}. Where no
class has two rows, each runs alone, and drafts gain nothing."""

_DEVICE_PREFILL = RowRange(128, 128)
"""Rows of a prompt's calls there: between two multiples of 256 keys are two calls."""

_DEVICE_CONTEXTS = (40, 1100, 4000)
"""Keys before compared calls there, which end before a multiple of 256."""

_SOFTWARE_ROWS = 4
"""Most rows of a call on a software device: each number of rows above is compiled in 10 to 50 s,
and those of a prompt in minutes."""


def device_rules(device: Device) -> list[RowRules]:
    """Candidates for a device."""
    if device.is_software:
        roles = [RowRange(*rows) for rows in ON_DEVICE if rows[1] <= _SOFTWARE_ROWS]
        return [RowRules(rows, rows) for rows in roles]
    return [RowRules(RowRange(*rows), _DEVICE_PREFILL) for rows in ON_DEVICE]


def measured(
    model: NativeModel,
    limits: CallLimits,
    may_be_single: Callable[[int], bool],
    context_length: int,
    threads: int,
) -> RowRules:
    """The cheapest rules within a library's limits that give equal bits; see `measure_rules`.

    `ALONE` where none does, or where the context is too short for calls that compare.
    """
    offload = model.offload
    known: Sequence[RowRules] = ROLLED_BACK if model.recurrent else CANDIDATES
    if offload is not None:
        known, limits = device_rules(offload.device), CallLimits() if offload.is_whole else limits
    elif limits.decode:
        known = (RowRules(RowRange(2, limits.decode), RowRange(limits.prompt, MOST_ROWS)), *known)
    candidates = [
        rules
        for rules in known
        if (offload or not model.span or rules.prefill.least <= _PADDED)
        and (rules.prefill.least >= limits.prompt or rules.prefill == rules.decode)
        and rules.most <= (limits.rows or MOST_ROWS)
        and rules.decode.most <= (limits.decode or MOST_ROWS)
    ]
    rollback = UNMEASURED.rollback if model.recurrent else 0
    with closing(Calls(model, context_length, threads, rollback)) as calls:
        return measure_rules(calls, candidates, may_be_single) or ALONE


class Calls:
    """The calls of a measurement, with random tokens; see `Prober`."""

    contexts: Sequence[int] = (40,)
    sizes: Sequence[int] = ()

    def __init__(
        self, model: NativeModel, context_length: int, threads: int, rollback: int = 0
    ) -> None:
        self.room = min(context_length, LONGEST)
        if model.offload is not None:
            self.room = min(context_length, _DEVICE_CONTEXTS[-1] + MOST_ROWS)
            fitting = (keys for keys in _DEVICE_CONTEXTS if keys + MOST_ROWS <= self.room)
            self.contexts = [*fitting] or self.contexts
        slots = whole(self.room + MOST_ROWS)
        self._sequence = model.sequence(ContextSettings(slots, MOST_ROWS, threads, rollback))
        self._tokens = np.random.default_rng(0).integers(0, model.vocab_size, slots).tolist()
        self._states = rollback > 0
        self._kept: tuple[int, State] | None = None  # recurrent state after the last prefill

    def prefill(self, length: int, rows: RowRange) -> None:
        if length < self._sequence.length:
            self._go_back(length)
        missing = self._tokens[self._sequence.length : length]
        for part in rows.split(len(missing)):
            call(self._sequence, missing, part, first=length, least=rows.least, least_outputs=1)
        if self._states:
            self._kept = length, self._sequence.recurrent_state()

    def rows(self, length: int, count: int, outputs: int) -> Logits:
        self._go_back(length)
        assert self._sequence.length == length
        return self._sequence.decode(
            self._tokens[length : length + count], slice(0, outputs)
        ).copy()

    def close(self) -> None:
        self._sequence.context.close()

    def _go_back(self, length: int) -> None:
        """Go back to `length` positions; with recurrent layers, to 0 where that cannot be.

        It can for `rows`, which begins where a prefill ended, or where the last call did.
        """
        if self._sequence.can_truncate(length):
            self._sequence.truncate(length)
        elif self._kept is not None and self._kept[0] == length:
            self._sequence.restore_recurrent(self._kept[1], length)
        else:
            self._sequence.truncate(0)
