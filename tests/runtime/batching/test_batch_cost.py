"""Costs of batched forward passes and the gain of drafts in them, from fake times."""

import random
from collections.abc import Sequence
from contextlib import closing
from itertools import accumulate
from operator import mul
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.decoding.auto import Acceptance, Auto
from paceline.decoding.costs import CostTable
from paceline.decoding.types import Block, Proposal
from paceline.engines.base import KVSequence, StepResult
from paceline.engines.costs import SharedCosts
from paceline.models import ModelFiles
from paceline.options import Options
from paceline.runtime.batching import batch
from paceline.runtime.batching.request import Load
from paceline.runtime.model import Model
from support.costs import give_costs
from support.drafters import drafted
from support.scheduling import Submitted
from support.toy import ToyEngine

ALONE = CostTable({1: 1.0, 8: 1.0, 9: 4.1, 32: 4.1})
"""Steps: on the whole a row adds 0.1."""


def share_of_a_row(cost: SharedCosts, sequences: int) -> float:
    """Return the relative cost of an additional row, which alone determines decisions."""
    return cost.row / cost(sequences, sequences)


def test_costs_are_learned_from_passes_of_any_size():
    cost, drawn = SharedCosts(ALONE), random.Random(1)
    assert cost(1, 1) == pytest.approx(1.0)
    for _ in range(400):
        count, rows = drawn.randint(2, 8), drawn.randint(8, 40)
        noise = drawn.choice((0.8, 1.0, 1.2))
        cost.observe(rows, count, noise * (0.9 + 0.5 * (count - 1) + 0.1 * rows))
    assert cost(11, 4) == pytest.approx(0.9 + 3 * 0.5 + 1.1, rel=0.1)
    assert 0.07 < cost.row < 0.16
    for _ in range(400):  # texts have become longer
        cost.observe(11, 4, 6.0)
    assert cost(11, 4) == pytest.approx(6.0, rel=0.05)


@pytest.mark.parametrize("slow", [1.0, 4.0])
@pytest.mark.parametrize(("shared", "row"), [(True, 0.1 / 4.1), (False, 0.1 / 32)])
def test_prefills_and_other_programs_do_not_change_the_cost_per_row(
    slow: float, shared: bool, row: float
):
    """Rows that seem free would be drafted, and would slow down all responses."""
    cost, noise = SharedCosts(ALONE, shared=shared), random.Random(1)
    seconds = 0.9 + 0.1 * 32 if shared else 32 * ALONE(1)
    if shared:
        cost.observe(512, 32, 3 * slow * (seconds + 48))  # the first call, which compiles
    for _ in range(40):
        cost.observe(32, 32, noise.uniform(0.7, 1.3) * slow * seconds)
    assert share_of_a_row(cost, 32) == pytest.approx(row, rel=0.35)


@pytest.mark.parametrize("seconds", [{1: 2.0}, {1: 2.0, 32: 2.0}])
def test_learned_costs_are_positive(seconds: dict[int, float]):
    cost = SharedCosts(CostTable(seconds))
    for rows, taken in ((30, 1e-9), (2, 9.0), (30, 1e-9)):
        assert cost.row > 0
        assert cost(2, 2) >= cost(2, 1) > 0
        cost.observe(rows, 2, taken)


@pytest.mark.parametrize("sequences", [2, 8, 32])
@pytest.mark.parametrize(("row", "sequence"), [(0.02, 0.2), (0.25, 0.1), (0.9, 0.0)])
def test_batched_drafts_are_never_slower_than_plain_by_the_learned_costs(
    sequences: int, row: float, sequence: float
):
    cost, drawn = SharedCosts(CostTable({1: 1.0, 32: 1 + 31 * 0.25})), random.Random(1)
    for _ in range(100):
        rows = sequences + drawn.randint(0, sequences)
        cost.observe(rows, sequences, 0.5 + row * rows + sequence * (sequences - 1))
    plain = sequences / cost(sequences, sequences)
    policy = Auto(8, ALONE, Acceptance())
    policy.set_batch_load(cost(sequences, sequences), cost.row, plain - policy.rate)
    for match in range(1, 24):
        draft = drafted(policy, Proposal([1] * 7, "suffix", match))
        expected = sum(accumulate(policy._acceptance.probabilities(draft), mul))
        seconds = cost(sequences + len(draft.tokens), sequences)
        assert (sequences + expected) / seconds >= plain * (1 - 1e-9)


def test_the_first_passes_of_each_role_are_made_before_a_request(monkeypatch: pytest.MonkeyPatch):
    engine, roles = ToyEngine(), list[list[bool]]()
    step = engine.step

    def recorded(work: Any) -> Any:
        roles.append([block.prefill for _, block in work])
        return step(work)

    monkeypatch.setattr(engine, "step", recorded)
    batch.Batcher(engine, ALONE, Load()).warm_up()
    assert roles == [[True], [False], [False, False]]


def asked(gains: list[float], price: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the passes that call drafters, given their gains and their price in tokens."""
    policies = [Auto(4, CostTable({1: 1.0}), Acceptance()) for _ in range(2)]  # 1 token/s
    clock, calls = [0.0], list[int]()
    monkeypatch.setattr(batch, "perf_counter", lambda: clock[0])

    def next_block(policy: Auto, call: int) -> Block:
        if policy._asks:
            policy.gain = gains[call] / 2
            clock[0] += price / 4
            calls.append(call)
        return Block([0], 1)

    batcher = batch.Batcher(ToyEngine(), ALONE, Load())
    for call in range(len(gains)):
        running = [
            SimpleNamespace(
                is_paused=lambda: False,
                job=SimpleNamespace(
                    prefilling=False,
                    recomputing=False,
                    policy=policy,
                    next_block=lambda _, policy=policy: next_block(policy, call),  # noqa: B023
                ),
            )
            for policy in policies
        ]
        assert len([*batcher.next_batch(cast("Any", running), lambda *_: None)]) == 2
    return sorted({*calls})


@pytest.mark.parametrize(("price", "burst"), [(0.03, 8), (0.2, 8), (0.2, 1), (1.0, 1)])
@pytest.mark.parametrize("worth", [0.0, 0.5, 2.0, 4.0])
def test_drafters_run_if_they_save_time_and_rarely_otherwise(
    price: float, burst: int, worth: float, monkeypatch: pytest.MonkeyPatch
):
    """`worth` is the mean gain over the price; one call in `burst` has all of the gain."""
    drawn = random.Random(int(100 * price))
    gains = [burst * worth * price * (drawn.random() < 1 / burst) for _ in range(2000)]
    always = sum(gain - price for gain in gains)
    gained = sum(gains[call] - price for call in asked(gains, price, monkeypatch))
    if worth > 1:
        assert gained > 0.8 * always
    else:
        assert always <= gained < 0
        assert gained > -2 / 32 * len(gains)


EACH = CostTable({1: 1.0, 2: 1.1, 4: 1.5, 8: 2.5, 16: 4.5, 32: 8.5})
"""Seconds by rows of a block, where calls are not shared."""

PROMPTS = [[at % 8 + 8 * number for at in range(30)] for number in range(8)]


class Unshared(ToyEngine):
    shares_calls = False

    def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
        seconds = sum(EACH(len(block.tokens)) for _, block in work)
        return super().step(work)._replace(seconds=seconds)


@pytest.mark.parametrize(("row", "rows"), [(1e-4, 512), (2.5e-3, 200), (1.0, 64)])
def test_prefill_passes_are_short_on_a_slow_machine_to_allow_cancelling(
    row: float, rows: int, tiny_files: ModelFiles
):
    calls: list[int] = []

    class Timed(ToyEngine):
        def step(self, work: Sequence[tuple[KVSequence, Block]]) -> StepResult:
            ((_, block),) = work
            calls.append(len(block.tokens))
            return super().step(work)._replace(seconds=row * len(block.tokens))

    model = Model(tiny_files, Timed(vocab_size=320, context_length=4096, cache_blocks=512))
    give_costs(model, EACH)
    options: Options = {"max_tokens": 1, "drafter": "none"}
    with closing(model.open_scheduler()) as scheduler:
        request = Submitted(model, PROMPTS[0] * 60, **options)
        scheduler.start()
        request.result()
    assert sum(calls) == 1800
    assert {*calls[1:-1]} == {rows}


def test_batching_does_not_shorten_drafts_if_passes_are_not_shared(tiny_files: ModelFiles):
    model = Model(tiny_files, Unshared(vocab_size=320, context_length=192, cache_blocks=512))
    give_costs(model, EACH)
    options: Options = {"max_tokens": 100, "drafter": "suffix", "ignore_eos": True}
    options |= {"temperature": 0.7, "seed": 3}
    alone = [model.generate(prompt, **options) for prompt in PROMPTS]
    with closing(model.open_scheduler()) as scheduler:
        submitted = [Submitted(model, prompt, **options) for prompt in PROMPTS]
        scheduler.start()
        batch = [request.result() for request in submitted]
    assert [result.token_ids for result in batch] == [result.token_ids for result in alone]
    drafted = sum(result.stats.drafted for result in alone)
    assert drafted > 50
    assert sum(result.stats.drafted for result in batch) > 0.7 * drafted
