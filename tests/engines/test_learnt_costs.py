"""What calls cost, learnt from the calls of answers."""

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
    """Rows of 10 % of a call, and 1 % of it per 100 tokens of context."""
    return 0.008 * (1 + 0.1 * (rows - 1)) * (1 + context / 10_000)


def answered(costs: Costs, seed: int, calls: int = 400, *, busy: bool = False) -> Costs:
    """Costs after an answer's calls: half of them plain, others of 2 to 8 rows."""
    draw = random.Random(seed)
    for call in range(calls):
        rows, context = draw.choice([1, 1, 1, 2, 4, 8]), draw.choice(CONTEXTS)
        speed = 1.5 if busy and call % 100 < 50 else 1.0
        noise = draw.lognormvariate(0, 0.05) * (8 if draw.random() < 0.01 else 1)
        costs.observe(rows, context, true_cost(rows, context) * noise * speed)
    return costs


@pytest.mark.parametrize("prior", [0.001, 0.008, 0.1])
def test_costs_become_those_of_the_calls_whatever_was_expected(prior: float):
    table = answered(Costs(prior), seed=1).table()
    for context in CONTEXTS:
        here = table.at_context(context)
        assert here(1) == pytest.approx(true_cost(1, context), rel=0.15)
        for rows in (2, 4, 8):
            ratio = true_cost(rows, context) / true_cost(1, context)
            assert here(rows) / here(1) == pytest.approx(ratio, rel=0.08), rows
    assert table(32) / table(1) < 6, "rows that were not seen cost less than expected, too"


def test_a_machine_whose_speed_varies_changes_no_ratio():
    steady = answered(Costs(0.01), seed=2).table()
    varying = answered(Costs(0.01), seed=2, busy=True).table()
    for rows in (2, 4, 8):
        ratio = steady(rows) / steady(1)
        assert varying(rows) / varying(1) == pytest.approx(ratio, rel=0.1)


def test_before_any_call_a_draft_costs_more_than_rows_do_in_most_engines():
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
def test_any_calls_leave_a_table_that_policies_can_use(calls: list[tuple[int, int, float]]):
    costs = Costs(0.01)
    for rows, context, seconds in calls:
        costs.observe(rows, context, seconds)
    table = costs.table().at_context(5000)
    values = [table(rows) for rows in ROWS]
    assert all(value > 0 for value in values)
    assert values == sorted(values), "a further row never makes a call cheaper"


def test_what_was_learnt_is_there_for_the_next_process_and_a_damaged_file_is_as_none(
    tmp_path: Path,
):
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


def test_costs_are_measured_by_calls_of_every_number_of_rows():
    engine, costs = ToyEngine(context_length=512), Costs(1.0)
    free = engine.free_slots
    measure(engine, costs)
    assert costs.is_known
    assert isinstance(costs.table(), CostTable)
    assert engine.free_slots == free
    small = ToyEngine(context_length=8)
    measure(small, Costs(1.0))
