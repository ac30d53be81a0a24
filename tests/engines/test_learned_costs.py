"""Forward-pass costs, learned from those of responses."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.costs import CostTable
from paceline.engines.costs import ROWS, Costs, StoredCosts, measure
from support.toy import ToyEngine

CONTEXTS = (100, 700, 3000)


def true_cost(rows: int, context: int) -> float:
    """Return a cost that grows by 10 % per row and by 1 % per 100 tokens of context."""
    return 0.008 * (1 + 0.1 * (rows - 1)) * (1 + context / 10_000)


def answered(costs: Costs, seed: int, calls: int = 400, *, busy: bool = False) -> Costs:
    """Return costs after a response: half of its passes are plain, the rest have 2 to 8 rows."""
    draw = random.Random(seed)
    for call in range(calls):
        rows, context = draw.choice([1, 1, 1, 2, 4, 8]), draw.choice(CONTEXTS)
        speed = 1.5 if busy and call % 100 < 50 else 1.0
        noise = draw.lognormvariate(0, 0.05) * (8 if draw.random() < 0.01 else 1)
        costs.observe(rows, context, true_cost(rows, context) * noise * speed)
    return costs


@pytest.mark.parametrize("prior", [0.001, 0.008, 0.1])
def test_costs_converge_to_measured_ones_from_any_prior(prior: float):
    table = answered(Costs(prior), seed=1).table()
    for context in CONTEXTS:
        here = table.at_context(context)
        assert here(1) == pytest.approx(true_cost(1, context), rel=0.15)
        for rows in (2, 4, 8):
            ratio = true_cost(rows, context) / true_cost(1, context)
            assert here(rows) / here(1) == pytest.approx(ratio, rel=0.08), rows
    assert table(32) / table(1) < 6, "unmeasured rows also cost less than expected"


def test_varying_machine_speed_does_not_change_cost_ratios():
    steady = answered(Costs(0.01), seed=2).table()
    varying = answered(Costs(0.01), seed=2, busy=True).table()
    for rows in (2, 4, 8):
        ratio = steady(rows) / steady(1)
        assert varying(rows) / varying(1) == pytest.approx(ratio, rel=0.1)


def test_the_prior_cost_of_a_row_is_higher_than_in_most_engines():
    table = Costs(0.05).table()
    assert table(1) == pytest.approx(0.05)
    assert table(8) / table(1) == pytest.approx(2.75)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(0, 100_000),
            st.floats(0, 1e4, allow_nan=False) | st.just(0.0),
        ),
        max_size=60,
    )
)
def test_any_measurements_give_a_usable_cost_table(calls: list[tuple[int, int, float]]):
    costs = Costs(0.01)
    for rows, context, seconds in calls:
        costs.observe(rows, context, seconds)
    table = costs.table().at_context(5000)
    values = [table(rows) for rows in ROWS]
    assert all(value > 0 for value in values)
    assert values == sorted(values), "a further row never makes a call cheaper"


def test_learned_costs_persist_and_a_corrupt_file_is_ignored(tmp_path: Path):
    def opened() -> StoredCosts:
        return StoredCosts(ToyEngine(), "model", 100_000_000, tmp_path)

    first = opened()
    assert not first.is_known
    answered(first, seed=3)
    first.store()
    again = opened()
    assert again.is_known
    assert [again.table()(rows) for rows in ROWS] == [first.table()(rows) for rows in ROWS]
    (file,) = tmp_path.glob("*.costs")
    for damaged in ("{", "[]", "{}", '{"line": [1], "ratios": {}}', '{"line": "x", "ratios": 3}'):
        file.write_text(damaged)
        assert not opened().is_known
        assert opened().table() == Costs(0.001 + 0.005).table()


def test_costs_are_measured_for_every_number_of_rows():
    engine, costs = ToyEngine(context_length=512), Costs(1.0)
    free = engine.free_slots
    measure(engine, costs)
    assert costs.is_known
    assert isinstance(costs.table(), CostTable)
    assert engine.free_slots == free
    small = ToyEngine(context_length=8)
    measure(small, Costs(1.0))
