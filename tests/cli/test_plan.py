import pytest

from paceline.cli.plan import cost_facts, costs_report
from paceline.decoding.costs import CostTable
from paceline.runtime.model import Model


def test_a_plan_has_a_second_table_if_long_contexts_cost_more(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    costs = CostTable({1: 0.01, 2: 0.012}, per_token={1: 1e-5, 2: 2e-5})
    monkeypatch.setattr(Model, "measured_costs", lambda _, again: costs)
    report = costs_report(model, measure=False)
    assert report.value["deep"]["context"] == 512
    assert "512 tokens" in report.tables[1][0]


def test_a_plan_has_a_row_per_measured_length_except_plain():
    free = cost_facts(CostTable({1: 0.01, 2: 0.01, 4: 0.01}))["rows"]
    dear = cost_facts(CostTable({1: 0.01, 2: 0.02, 4: 0.04}))["rows"]
    assert [(row["rows"], row["milliseconds"], row["ratio"]) for row in free] == [
        (2, 10, 1),
        (4, 10, 1),
    ]
    for row in free:  # any chance pays, and certainty brings all rows
        assert row["break_even"] == pytest.approx(0, abs=1e-9)
        assert row["speed_up"]["1.0"] == pytest.approx(row["rows"])
        gains = [*row["speed_up"].values()]
        assert gains == sorted(gains)
    for row in dear:  # only certainty breaks even
        assert row["break_even"] == pytest.approx(1)
        assert row["speed_up"]["0.5"] < 1
