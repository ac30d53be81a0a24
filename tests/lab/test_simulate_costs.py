import json
from pathlib import Path

import pytest

from paceline.decoding.costs import CostTable
from paceline.errors import InvalidRequest
from paceline.plan import plan
from paceline.runtime.model import Model
from paceline_lab.simulate.costs import parse_costs


def here() -> CostTable:
    return CostTable({1: 0.5})


def never() -> CostTable:
    raise AssertionError("measured without need")


def test_given_ones():
    found = parse_costs("1=12,4=13.5", never).table
    assert (found(1), found(4)) == (0.012, 0.0135)


def test_recorded_ones_are_those_that_were_measured(model: Model, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan(model, measure=False).value))
    found, measured = parse_costs(str(path), never).table, model.costs.table()
    for context in (1, 256, 400):
        for rows in (1, 2, 7, 16, 32):
            there, here = found.at_context(context)(rows), measured.at_context(context)(rows)
            assert there == pytest.approx(here)


def test_recorded_ones_know_the_longer_context(tmp_path: Path):
    path = tmp_path / "plan.json"
    near = {"context": 100, "plain_milliseconds": 10.0, "rows": [{"rows": 4, "milliseconds": 12}]}
    deep = {"context": 600, "plain_milliseconds": 15.0, "rows": [{"rows": 4, "milliseconds": 22}]}
    path.write_text(json.dumps({**near, "deep": deep}))
    found = parse_costs(str(path), never).table
    assert found.at_context(100)(4) == pytest.approx(0.012)
    assert found.at_context(1100)(1) == pytest.approx(0.020)
    assert found.at_context(1100)(4) == pytest.approx(0.032)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("nowhere.json", "cannot be read .*expected here, zaya, phi-4-mini"),
        ("1=", "expected milliseconds by rows"),
        ("1=-3", "expected milliseconds by rows"),
    ],
)
def test_anything_else_is_refused_in_one_line(said: str, message: str):
    with pytest.raises(InvalidRequest, match=message) as raised:
        parse_costs(said, never)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        '{"rows": [{"rows": 4}], "plain_milliseconds": 3}',
        '{"rows": [], "plain_milliseconds": 0}',
        '{"rows": [], "plain_milliseconds": 3, "deep": {"rows": [], "plain_milliseconds": 3}}',
    ],
)
def test_a_file_that_is_no_plan_is_refused_by_its_name(content: str, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidRequest, match=r"plan\.json(,|:| is not JSON)"):
        parse_costs(str(path), never)
