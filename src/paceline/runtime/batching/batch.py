"""Batches: a block of every decode, and as many prefill rows as do not delay those.

Independent of the queue, and of what becomes of a call's rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import perf_counter

from paceline.decoding.auto import Auto
from paceline.decoding.costs import CostTable
from paceline.decoding.types import Block, Step
from paceline.engines.base import Engine, StepResult
from paceline.runtime.batching.request import Load, QueuedRequest
from paceline.runtime.pooled import PooledStream
from paceline.runtime.stream import Stream, run_step

Work = tuple[Stream | PooledStream, Block]
"""An answer or an embedding, and its next block."""

Fail = Callable[[QueuedRequest, Exception], None]
"""Ends a request whose block could not be made."""

_PREFILL_ROWS = 512
"""Prefill rows of a call without decodes."""

_PREFILL_SECONDS = 0.1
"""Time that prefills may add to a call with decodes."""

_MIN_CHUNK = 16
"""Fewest rows of a prefill in a call."""

_KEPT = 31 / 32
"""Weight of a measured call after the next one."""

_SEQUENCE_ROWS = 0.5
"""Cost of a sequence before any call, in rows, in an engine that shares calls."""

_PRIOR_WEIGHTS = 0.5, 1.0
"""Weights, in calls, of the profile's scale and of a sequence's cost before any call. While all
calls have as many rows as sequences, they cannot tell a slow machine from costly sequences: it
counts as slow."""

_MOST_LOSS = 1.0
"""Tokens that asking may lose before the gate closes."""

_MOST_CREDIT = 4.0
"""Tokens that asking has gained before and may lose again: gains come in bursts."""

_CLOSED_CALLS = 31
"""Calls for which the gate stays closed. Asking again loses a token, 0.1 % of 32 calls of 32."""

_MIN_ROW_COST = 1 / 64
"""Least cost of a further row, as a share of a call of one row: a measured profile may be flat."""


class BatchCost:
    """Seconds of a batched call: scale * (fixed + row * (rows + sequence_rows * others)).

    `others` are the sequences after the first; `fixed` and `row` are from the profile of one. It
    goes up in steps, because its graph is compiled for the usual row counts; a batched call has any
    number of rows, so a row costs the profile's mean slope. Two numbers are learnt from the last
    calls, by least squares of relative errors: the scale, which other programs raise, and what a
    sequence costs in rows, as its KV is read in every call. Taken for one another, they would make
    a row look free, or too dear to draft.
    """

    def __init__(self, alone: CostTable, *, shared: bool = True) -> None:
        """Start from the cost profile of calls with one sequence.

        `shared` is `Engine.shares_calls`; without, every sequence has the fixed cost.
        """
        self._row = max(alone.per_row, alone(1) * _MIN_ROW_COST)
        self._fixed = max(alone(1) - self._row, 0.0)
        self._prior = _SEQUENCE_ROWS if shared else self._fixed / self._row
        self._scale, self._sequence_rows = 1.0, self._prior
        self._sums = [0.0] * 5
        """Of 1, u, u^2, y and u y over the calls, newer ones with more weight; see `learn`."""

    @property
    def row(self) -> float:
        """Seconds of one more row."""
        return self._scale * self._row

    def __call__(self, sequences: int, rows: int) -> float:
        """Seconds of a call."""
        all_rows = rows + self._sequence_rows * (sequences - 1)
        return self._scale * (self._fixed + self._row * all_rows)

    def learn(self, sequences: int, rows: int, seconds: float) -> None:
        """Update from a measured call.

        With y = seconds / (fixed + row * rows) and u = row * others / (fixed + row * rows) the
        model is y = a + b u, a line; the scale is a, and a sequence costs b / a rows.
        """
        profile = self._fixed + self._row * rows
        y, u = seconds / profile, self._row * (sequences - 1) / profile
        terms = (1.0, u, u * u, y, u * y)
        self._sums = [_KEPT * old + new for old, new in zip(self._sums, terms, strict=True)]
        weight_a, weight_b = _PRIOR_WEIGHTS
        count, sum_u, sum_uu, sum_y, sum_uy = self._sums
        # b is pulled to its prior at the mean scale of the calls: a busy machine scales both.
        prior_b = self._prior * sum_y / (count + self._prior * sum_u)
        count, sum_y = count + weight_a, sum_y + weight_a
        sum_uu, sum_uy = sum_uu + weight_b, sum_uy + weight_b * prior_b
        determinant = count * sum_uu - sum_u * sum_u
        a = (sum_y * sum_uu - sum_u * sum_uy) / determinant
        b = (count * sum_uy - sum_u * sum_y) / determinant
        self._scale = max(a, _MIN_ROW_COST)
        self._sequence_rows = max(b, 0.0) / self._scale


class DraftGate:
    """Whether the requests of a call ask their drafters: while drafts are worth the time of asking.

    A row delays all requests of its call, so with many of them few drafts pay; asking them takes
    time in every call all the same. Tokens per call at the rate of the batch (openvino in one
    thread, SmolLM2 135M, 2026-11-26):

        requests                     2      8      16     32
        expected gain of drafts      0.28   0.20   0.11   < 0
        time of asking               0.03   0.18   0.43   1.02    closed from 16 on
    """

    def __init__(self) -> None:
        """Begin open."""
        self._credit = 0.0
        self._closed = 0  # calls left

    def asks(self) -> bool:
        """Whether the next call asks drafters; if so, `learn` follows."""
        if not self._closed:
            return True
        self._closed -= 1
        return False

    def learn(self, gain: float, price: float) -> None:
        """Add the expected gain of a call's drafts less the price of asking, both in tokens."""
        self._credit = min(self._credit + gain - price, _MOST_CREDIT)
        if self._credit < -_MOST_LOSS:
            self._credit, self._closed = 0.0, _CLOSED_CALLS


class Batcher:
    """Composes and runs batches, and learns what they cost."""

    def __init__(self, engine: Engine, alone: CostTable, load: Load) -> None:
        """Start from the cost profile of calls with one sequence; `load` counts the calls."""
        self.cost = BatchCost(alone, shared=engine.shares_calls)
        self._gate = DraftGate()
        self._engine, self._load = engine, load
        self._started: float | None = None

    @property
    def call_seconds(self) -> float:
        """Seconds that the current engine call has taken so far; 0.0 between calls."""
        started = self._started
        return 0.0 if started is None else perf_counter() - started

    def warm_up(self) -> None:
        """Run one batched call: an engine may compile for its first one."""
        sequences = [self._engine.open() for _ in range(2)]
        with suppress(Exception):  # the first request meets the same error
            self._engine.step([(sequence, Block([0], 1)) for sequence in sequences])
        for sequence in sequences:
            sequence.close()

    def run(self, work: Sequence[Work]) -> list[Step | Exception]:
        """Run a batch in one call of the engine; see `run_step`."""
        self._started = started = perf_counter()
        rows = sum(len(block.tokens) for _, block in work)

        def observe(result: StepResult) -> None:
            self._started = None
            if len(work) > 1:
                self.cost.learn(len(work), rows, result.seconds)
            self._load.rows += rows
            self._load.calls += 1
            self._load.call_seconds += perf_counter() - started

        try:
            return run_step(self._engine, work, observe)
        finally:
            self._started = None

    def next_batch(
        self, running: list[QueuedRequest], fail: Fail
    ) -> Iterator[tuple[QueuedRequest, Work]]:
        """The blocks of a call, decodes first. Sorts `running` for the round-robin of prefills.

        A request whose block cannot be made is ended by `fail` and left out.
        """
        decodes = [queued for queued in running if not _prefills(queued)]
        prefills = [queued for queued in running if _prefills(queued)]
        rate = sum(policy.rate for policy in map(_auto, decodes) if policy)
        rows = len(decodes)  # a request without a block yet has at least one row
        # Where calls are not shared, a block takes none of the others' time but its own.
        shared = len(running) > 1 and self._engine.shares_calls
        asks = bool(shared and rate and self._gate.asks())
        gain, started = 0.0, perf_counter()
        for queued in decodes:
            try:
                policy = _auto(queued)
                if policy and shared:
                    cost = self.cost(len(decodes), rows)
                    policy.set_batch_load(cost, self.cost.row, rate - policy.rate, drafts=asks)
                elif policy:
                    policy.clear_batch_load()
                work = _work(queued)
                gain += policy.gain if policy else 0.0
            except Exception as error:  # of a drafter, a policy or a constraint
                fail(queued, error)
                continue
            rows += len(work[1].tokens) - 1
            yield queued, work
        if asks:
            self._gate.learn(gain, rate * (perf_counter() - started))
        if not prefills:
            return
        room = _PREFILL_ROWS
        if decodes:
            room = min(room, max(int(_PREFILL_SECONDS / self.cost.row), _MIN_CHUNK))
        share = max(room // len(prefills), _MIN_CHUNK)
        chosen = prefills[: max(room // share, 1)]
        for queued in chosen:
            try:
                work = _work(queued, share)
            except Exception as error:
                fail(queued, error)
                continue
            yield queued, work
        running.sort(key=lambda queued: queued in chosen)


def _stream(queued: QueuedRequest) -> Stream | PooledStream:
    assert queued.stream is not None
    return queued.stream


def _prefills(queued: QueuedRequest) -> bool:
    """Whether its next rows are prefill, or recompute an answer after a preemption."""
    stream = _stream(queued)
    return stream.prefilling or stream.recomputing


def _auto(queued: QueuedRequest) -> Auto | None:
    policy = _stream(queued).policy
    return policy if isinstance(policy, Auto) else None


def _work(queued: QueuedRequest, max_rows: int | None = None) -> Work:
    stream = _stream(queued)
    return stream, stream.next_block(max_rows)
