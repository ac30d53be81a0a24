"""An error injected into every call of the scheduler, one at a time.

Not a list of known faults: a profile function in the engine's thread counts the calls that go out
of the scheduler's files, and raises at the entry of one of them. Whatever it was, at most one
request ends with it, the others get the tokens that they get alone, and no slot is lost.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import paceline.runtime.batching
from paceline.decoding.costs import CostTable
from paceline.decoding.types import FINAL_NORM, ComputedBlock, Drafter, Proposal, Step, tap_name
from paceline.engines.base import StepResult
from paceline.models import ModelFiles
from paceline.runtime.batching import admission, batch
from paceline.runtime.batching.request import BatchRequest, Event
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.embedding import Embedding, EmbeddingJob
from paceline.runtime.model import Model
from paceline.runtime.request import check
from paceline.runtime.result import Result
from support.costs import give_costs
from support.scheduling import Submitted
from support.toy import ToyEngine

BATCHING = Path(paceline.runtime.batching.__file__).parent
SCHEDULER = {
    str(BATCHING / f"{name}.py") for name in ("scheduler", "admission", "batch", "prefix_cache")
}
"""The files that are the scheduler, with `run_step`: a call from one to another is also one."""

OURS = (str(BATCHING.parents[1]), str(Path(__file__).parents[2]))

COSTS = CostTable({1: 1e-3, 32: 2e-3})


class Injected(Exception):
    """The injected error."""


Site = tuple[str, int, str]
"""A call: the caller's file and line, and the function called."""


def is_scheduler(code: CodeType) -> bool:
    return code.co_filename in SCHEDULER or code.co_name == "run_step"


class Injector:
    def __init__(self, at: int | None) -> None:
        """Raise at call number `at`; None: count them."""
        self.at, self.count, self.sites = at, 0, list[Site]()
        self.raised: Site | None = None

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or not is_scheduler(caller.f_code):
            return
        called = frame.f_code
        inside = called.co_filename == caller.f_code.co_filename and is_scheduler(called)
        # The last call of all empties the prefix cache; the sequences that it closes are counted.
        inside |= called.co_qualname == "PrefixCache.close"
        # It catches errors of its calls, and those are injected.
        inside |= called.co_name == "close_sequence"
        if inside or not called.co_filename.startswith(OURS) or called.co_name == "<genexpr>":
            return
        site = (Path(caller.f_code.co_filename).stem, caller.f_lineno, called.co_qualname)
        self.count += 1
        if self.at is None:
            self.sites.append(site)
        elif self.count == self.at:
            self.raised = site
            raise Injected(f"{site}")


@contextmanager
def injected(injector: Injector) -> Iterator[None]:
    """Install it as the profile function of threads started in the context."""
    threading.setprofile(injector)
    try:
        yield
    finally:
        threading.setprofile(None)


COMMON: dict[str, Any] = {"seed": 3, "ignore_eos": True}

REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([3, 1, 4, 1, 5, 9, 2, 6] * 5, {"drafter": "suffix", "max_tokens": 30}),
    ([3, 1, 4, 1, 5, 9, 2, 6] * 5, {"drafter": "ngram", "max_tokens": 30, "temperature": 0.8}),
    ([9, 9, 8, 7, 3], {"drafter": "none", "max_tokens": 34}),
    ([7, 7, 3, 1, 2] * 2, {"drafter": "suffix+ngram:min=1", "max_tokens": 38, "policy": "fixed"}),
]


TEXT = [5, 4, 3, 2, 1] * 4
"""Of the request for an embedding, which is the last one."""
VECTOR = [math.sqrt(0.5)] * 2
NO_DRAFT = check({"max_tokens": 1, "drafter": "none"})


class TappedEngine(ToyEngine):
    """An engine whose hidden states have the same mean for every text."""

    def step(self, work: Any) -> StepResult:
        name = tap_name(FINAL_NORM)
        taps = [{name: np.ones((len(block.tokens), 2), np.float32)} for _, block in work]
        return super().step(work)._replace(taps=taps)


def server_request(model: Model, number: int) -> BatchRequest:
    if number == len(REQUESTS):

        def embed(sequence: Any, _: object) -> EmbeddingJob:
            return EmbeddingJob(sequence, TEXT, "mean")

        return BatchRequest(model, TEXT, NO_DRAFT, cached=False, open_job=embed)
    prompt, options = REQUESTS[number]
    asked: Any = {**options, **COMMON}
    return BatchRequest(model, prompt, check(asked))


def toy_model(files: ModelFiles) -> Model:
    model = Model(files, TappedEngine(vocab_size=320, context_length=128, cache_blocks=17))
    give_costs(model, COSTS)
    return model


@pytest.fixture
def expected(tiny_files: ModelFiles) -> list[list[float]]:
    model = toy_model(tiny_files)
    alone = (
        model.generate(prompt, **{**options, **COMMON, "drafter": "none"})
        for prompt, options in REQUESTS
    )
    return [*map(answer, alone), pytest.approx(VECTOR)]


def scenario(files: ModelFiles, injector: Injector) -> tuple[Scheduler, list[Event]]:
    """Run all requests together in a cache too small for them; return how each ended."""
    model = toy_model(files)
    free = model.engine.free_slots
    scheduler = model.open_scheduler()
    ends: dict[int, Event] = {}
    ended = threading.Semaphore(0)

    def listener(number: int) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            if not isinstance(event, Step):
                assert number not in ends, "a request ended twice"
                ends[number] = event
                ended.release()

        return listen

    numbers = range(len(REQUESTS) + 1)
    for number in numbers:
        scheduler.submit(server_request(model, number), listener(number))
    with injected(injector):
        scheduler.start()
    for _ in numbers:
        assert ended.acquire(timeout=30), f"a request never ended; raised at {injector.raised}"
    # Whatever happened, the next request is served as if nothing had.
    scheduler.submit(server_request(model, 2), listener(-1))
    assert ended.acquire(timeout=30), f"the scheduler is stuck; raised at {injector.raised}"
    assert scheduler.alive
    scheduler.close(grace=5)
    assert not scheduler.alive
    assert scheduler.load.running == scheduler.load.waiting == 0
    assert model.engine.free_slots == free, f"slots are lost; raised at {injector.raised}"
    return scheduler, [ends[number] for number in (*numbers, -1)]


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit requests that do not fit together, so that one is preempted."""
    monkeypatch.setattr(admission, "_HEADROOM", 4)


def answer(event: Event) -> list[float]:
    if isinstance(event, Embedding):
        return [float(number) for number in event.vector]
    assert isinstance(event, Result), event
    return [*event.token_ids]


@pytest.mark.usefixtures("little_room")
def test_the_scenario_preempts_evicts_and_shares(
    tiny_files: ModelFiles, expected: list[list[float]]
):
    injector = Injector(None)
    scheduler, ends = scenario(tiny_files, injector)
    assert [answer(end) for end in ends] == [*expected, expected[2]]
    assert scheduler.load.preempted > 0
    assert scheduler.prefix_cache.hit_tokens > 0
    called = {name for _, _, name in injector.sites}
    assert called > {
        *("TappedEngine.step", "ToyEngine.open", "BlockTable.fork", "BlockTable.close"),
        *("Model._open_answer", "Answer.accept", "Answer.next_block", "Answer.restart"),
        *("EmbeddingJob.next_block", "EmbeddingJob.accept", "SharedCosts.observe"),
        *("PrefixCache.insert", "PrefixCache.evict", "Auto.set_batch_load"),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("little_room")
def test_an_error_in_any_call_ends_at_most_one_request(
    tiny_files: ModelFiles, expected: list[list[float]], caplog: pytest.LogCaptureFixture
):
    counting = Injector(None)
    scenario(tiny_files, counting)
    # Of each call in the source the first two times, and then now and then. But a listener's
    # later call may be a request's last, which this test waits for.
    seen = Counter[Site]()
    numbers = []
    for number, site in enumerate(counting.sites, start=1):
        seen[site] += 1
        if seen[site] <= 2 or (seen[site] % 29 == 0 and not site[2].endswith("listen")):
            numbers.append(number)
    assert len(seen) > 40
    caplog.set_level("CRITICAL")
    ended = 0
    for number in numbers:
        injector = Injector(number)
        _, ends = scenario(tiny_files, injector)
        failed = [event for event in ends if isinstance(event, Exception)]
        assert len(failed) <= 1, f"{len(failed)} requests failed; raised at {injector.raised}"
        assert all(isinstance(item, Injected) for item in failed)
        ended += len(failed)
        for end, right in zip(ends, [*expected, expected[2]], strict=True):
            if not isinstance(end, Exception):
                assert answer(end) == right, f"raised at {injector.raised}"
    assert ended > 40, "the call raises the profile function's error"


# -- drafters --------------------------------------------------------------------------------------


class FaultyDrafter(Drafter):
    """A good drafter until its n-th method call raises."""

    name = "faulty"

    def __init__(self, method: str, at: int) -> None:
        self._method, self._left = method, at
        self._seen: list[int] = []

    def _raise(self, method: str) -> None:
        if method == self._method:
            self._left -= 1
            if self._left == 0:
                raise Injected(method)

    def propose(self, context: Any, limit: int) -> Proposal:
        self._raise("propose")
        return Proposal(list(context[-min(limit, 4) :]), self.name, 4)

    def before_verify(self, context: Any, draft: Any) -> None:
        self._raise("sent")

    def observe(self, computed: ComputedBlock) -> None:
        self._raise("observe")

    def cost(self, limit: int) -> float:
        self._raise("cost")
        return 0.0

    def close(self) -> None:
        self._raise("close")


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize(
    ("policy", "method"),
    [
        *product(("auto", "fixed"), ("propose", "sent", "observe", "close")),
        ("auto", "cost"),  # the other never asks for it
    ],
)
def test_a_drafter_that_raises_is_disabled_and_the_response_continues(
    tiny_files: ModelFiles,
    expected: list[list[float]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    at: int,
    policy: str,
):
    from paceline.drafters import DrafterSpec
    from paceline.drafters import create as made

    def create(spec: DrafterSpec, *more: Any) -> list[Drafter]:
        faulty: list[Drafter] = [FaultyDrafter(method, at)] if spec.has("ngram") else []
        return [*faulty, *made(spec, *more)]

    monkeypatch.setattr("paceline.drafters.create", create)
    # Drafting takes real time, which a busy machine makes long next to passes with fake times.
    monkeypatch.setattr(batch, "_MAX_LOSS", math.inf)
    model = toy_model(tiny_files)
    scheduler = model.open_scheduler()
    how: dict[str, Any] = {**COMMON, "drafter": "ngram", "policy": policy}
    asked = [Submitted(model, p, **{**options, **how}) for p, options in REQUESTS[:3:2]]
    scheduler.start()
    assert [answer(one.result()) for one in asked] == expected[:3:2]
    scheduler.close()
    raises = method != "close" or at == 1
    assert scheduler.load.failed_drafters["faulty"] == (2 if raises else 0)


def test_a_slow_drafter_is_disabled():
    from paceline.drafters import GuardedDrafter

    faults = []
    slow = FaultyDrafter("none", 0)
    guarded = GuardedDrafter(slow, lambda *fault: faults.append(fault), seconds=-1.0)
    first = guarded.propose([1, 2, 3], 2)
    assert list(first.tokens) == [2, 3], "its draft is used"
    assert not guarded.propose([1, 2, 3], 2).tokens
    assert [name for name, _ in faults] == ["faulty"]
    assert guarded.disabled
