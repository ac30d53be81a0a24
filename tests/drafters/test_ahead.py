"""Drafting while the target verifies the block before."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.decoding.costs import CostTable
from paceline.decoding.policy import Fixed
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Block, Policy, Proposal
from paceline.drafters import DrafterResources, DrafterSpec, DraftModel, create
from paceline.drafters.ahead import AheadDrafter
from paceline.engines.base import StepResult
from paceline.errors import InvalidRequest
from support.drafters import Oracle
from support.driver import generation, run
from support.errors import raises
from support.toy import ToyEngine
from support.waiting import PATIENCE

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
COUNT = 40


@pytest.fixture(scope="module")
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def truth() -> list[int]:
    plain = generation(ToyEngine(), PROMPT, stopping=Stopping(max_tokens=COUNT))
    return [*PROMPT, *run(ToyEngine(), [plain])[0].tokens]


def asked(policy: Policy, drafter: AheadDrafter, **more: Any) -> Any:
    return generation(
        ToyEngine(),
        PROMPT,
        stopping=Stopping(max_tokens=COUNT),
        drafters=[drafter],
        policy=policy,
        **more,
    )


@pytest.mark.parametrize("wrong", [[], [2], [4], [5]])
def test_the_first_draft_is_not_made_ahead_and_a_rejection_drops_one(
    wrong: list[int], truth: list[int], worker: ThreadPoolExecutor
):
    drafter = AheadDrafter(Oracle(truth, wrong_at=[len(PROMPT) + at for at in wrong]), worker)
    request = asked(Fixed(4), drafter)
    assert run(ToyEngine(), [request])[0].tokens == truth[len(PROMPT) :]
    assert drafter.used == request.counters.drafted_at[0] - 1 - len(wrong) > 5


class Waiting(ToyEngine):
    """A decode call with a draft returns once the drafter has been asked meanwhile."""

    def __init__(self, meanwhile: threading.Event) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def step(self, work: Sequence[Any]) -> StepResult:
        if len(work[0][1].tokens) > 1 and work[0][0].length >= len(PROMPT):
            assert self.meanwhile.wait(PATIENCE), "no draft while the target verifies"
        self.meanwhile.clear()
        return super().step(work)


class Signalling(Oracle):
    def __init__(self, text: Sequence[int], asked: threading.Event) -> None:
        super().__init__(text)
        self.signal = asked
        self.threads: set[str] = set()

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        self.threads.add(threading.current_thread().name)
        proposal = super().propose(context, limit)
        self.signal.set()
        return proposal


def test_drafting_ahead_runs_during_verification(truth: list[int]):
    proposed = threading.Event()
    oracle = Signalling(truth, proposed)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        request = asked(Fixed(4), AheadDrafter(oracle, pool))
        assert run(Waiting(proposed), [request])[0].tokens == truth[len(PROMPT) :]
    assert oracle.threads == {"ahead_0"}, "one thread uses its state"


def test_a_finished_draft_costs_nothing(truth: list[int]):
    class Slow(Oracle):
        def cost(self, limit: int) -> float:
            return 0.5

    with ThreadPoolExecutor(1) as pool:
        drafter = AheadDrafter(Slow(truth), pool)
        request = asked(Fixed(4), drafter)
        engine = ToyEngine()
        slots = engine.open()
        costs = []
        for _ in range(4):
            block: Block = request.next_block()
            pool.submit(lambda: None).result()  # the draft ahead is ready
            result = engine.step([(slots, block)])
            slots.commit(request.accept(result.logits[0]).accepted_rows)
            costs.append(drafter.cost(3))
        slots.close()
    assert costs == [0.5, 0.0, 0.0, 0.0]
    assert request.counters.hidden_seconds > 0.0


def test_ahead_opens_a_separate_draft_model():
    engine = ToyEngine()
    opened: list[str] = []

    def small(name: str) -> DraftModel:
        opened.append(name)
        return DraftModel(engine, CostTable({1: 0.01}), min_probability=0.0)

    shared = DrafterResources(open_model=small)
    (drafter,) = create("ahead:model:toy", shared)
    assert isinstance(drafter, AheadDrafter)
    # A drafter in the main thread has another engine.
    create("model:toy", shared)
    create("ahead:model:toy", shared)
    assert opened == ["toy", "toy"]
    assert len(drafter.propose(PROMPT, 3).tokens) == 3
    free = engine.free_slots
    drafter.close()
    assert engine.free_slots > free


@pytest.mark.parametrize("spec", ["ahead", "ahead:suffix", "ahead:model", "ahead:dflash"])
def test_drafters_that_are_free_or_need_the_target_cannot_run_ahead(spec: str):
    with raises(InvalidRequest):
        DrafterSpec.parse(spec)


def test_published_results_omit_the_folder_of_an_ahead_drafter():
    assert DrafterSpec.parse("ahead:model:/a/b+suffix").without_folders == "ahead:model:b+suffix"
