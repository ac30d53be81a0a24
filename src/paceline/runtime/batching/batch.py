"""Batches: a block of every decode, and as many prefill rows as do not delay those.

Independent of the queue, and of the use of a forward pass's rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import perf_counter

from paceline.decoding.auto import Auto
from paceline.decoding.costs import CostTable
from paceline.decoding.types import Block, Step
from paceline.engines.base import Engine, StepResult
from paceline.engines.costs import SharedCosts
from paceline.runtime.answer import Job, Work, run_step
from paceline.runtime.batching.request import BatchRequest, Load

Fail = Callable[[BatchRequest, Exception], None]
"""Ends a request whose block could not be made."""

_PREFILL_ROWS = 512  # in a pass without decodes
_PREFILL_SECONDS = 0.1  # that prefills may add to a pass with decodes
_MIN_CHUNK = 16  # minimum rows of a prefill in a pass
_CALL_SECONDS = 0.5  # of a pass without decodes: a disconnected client's request ends after it
_MIN_CALL = 64  # minimum rows of such a pass, even if slow: fewer would read the weights too often

_MAX_LOSS = 1.0
"""Tokens that querying drafters may lose before passes run without drafts."""

_MAX_CREDIT = 4.0
"""Maximum tokens that earlier drafts have gained and later ones may lose: gains come in bursts."""

_PLAIN_CALLS = 31
"""Passes without drafts after such a loss. Retrying loses a token, 0.1 % of 32 passes of 32."""


class Batcher:
    """Composes and runs batches, and learns their cost.

    A draft token delays every request in the batch, and querying the drafters takes time in each
    pass: with many requests the expected gain is smaller than that time, and drafts stop.
    """

    def __init__(self, engine: Engine, alone: CostTable, load: Load) -> None:
        self.cost = SharedCosts(alone, shared=engine.shares_calls)
        self._credit = 0.0  # tokens that drafts have gained
        self._plain_calls = 0  # remaining passes without drafts
        self._engine, self._load = engine, load
        self._started: float | None = None
        self._prefill_row = self.cost.row  # seconds per row in passes without decodes

    @property
    def call_seconds(self) -> float:
        """The seconds that the current forward pass has taken so far; 0.0 between passes."""
        started = self._started
        return 0.0 if started is None else perf_counter() - started

    def warm_up(self) -> None:
        """Run a prefill, a decode and a batched pass: an engine may compile for its first ones."""
        sequences = [self._engine.open() for _ in range(2)]
        for count, prefill in ((1, True), (1, False), (2, False)):
            with suppress(Exception):  # the first request raises the same error
                block = Block([0], 1, prefill=prefill)
                self._engine.step([(sequence, block) for sequence in sequences[:count]])
        for sequence in sequences:
            sequence.close()

    def run(self, work: Sequence[Work]) -> list[Step | Exception]:
        self._started = started = perf_counter()
        rows = sum(len(block.tokens) for _, block in work)

        def observe(result: StepResult) -> None:
            self._started = None
            if len(work) > 1:
                self.cost.observe(rows, len(work), result.seconds)
            if rows >= _MIN_CALL and all(block.prefill for _, block in work):
                self._prefill_row = result.seconds / rows
            self._load.rows += rows
            self._load.calls += 1
            self._load.call_seconds += perf_counter() - started

        try:
            return run_step(self._engine, work, observe)
        finally:
            self._started = None

    def next_batch(
        self, running: list[BatchRequest], fail: Fail
    ) -> Iterator[tuple[BatchRequest, Work]]:
        """Yield the blocks of a forward pass, decodes first; paused requests have none.

        Sorts `running` for the round-robin of prefills. If a request's block cannot be made, `fail`
        ends that request, and the pass runs without it.
        """
        active = [queued for queued in running if not queued.is_paused()]
        decodes = [queued for queued in active if not _prefills(queued)]
        prefills = [queued for queued in active if _prefills(queued)]
        rate = sum(policy.rate for policy in map(_auto, decodes) if policy)
        rows = len(decodes)  # a request without a block yet has at least one row
        # If passes are not shared, a block takes only its own request's time.
        shared = len(active) > 1 and self._engine.shares_calls
        asks = bool(shared and rate) and not self._plain_calls
        self._plain_calls = max(self._plain_calls - 1, 0)
        gain, started = 0.0, perf_counter()
        for queued in decodes:
            try:
                policy = _auto(queued)
                if policy and shared:
                    cost = self.cost(rows, len(decodes))
                    policy.set_batch_load(cost, self.cost.row, rate - policy.rate, drafts=asks)
                elif policy:
                    policy.clear_batch_load()
                work = _work(queued)
                gain += policy.gain if policy else 0.0
            except Exception as error:  # from a drafter, a policy or a constraint
                fail(queued, error)
                continue
            rows += len(work[1].tokens) - 1
            yield queued, work
        if asks:
            price = rate * (perf_counter() - started)
            self._credit = min(self._credit + gain - price, _MAX_CREDIT)
            if self._credit < -_MAX_LOSS:
                self._credit, self._plain_calls = 0.0, _PLAIN_CALLS
        if not prefills:
            return
        if decodes:
            room = max(int(_PREFILL_SECONDS / self.cost.row), _MIN_CHUNK)
        else:
            room = max(int(_CALL_SECONDS / self._prefill_row), _MIN_CALL)
        room = min(room, _PREFILL_ROWS)
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


def _job(queued: BatchRequest) -> Job:
    assert queued.job is not None
    return queued.job


def _prefills(queued: BatchRequest) -> bool:
    """Return whether its next rows are prefill, or recompute an answer after a preemption."""
    job = _job(queued)
    return job.prefilling or job.recomputing


def _auto(queued: BatchRequest) -> Auto | None:
    policy = _job(queued).policy
    return policy if isinstance(policy, Auto) else None


def _work(queued: BatchRequest, max_rows: int | None = None) -> Work:
    job = _job(queued)
    return job, job.next_block(max_rows)
