import pytest

from paceline.decoding.costs import CostTable
from paceline.errors import InvalidRequest
from paceline_lab.simulate.costs import parse_costs


def here() -> CostTable:
    return CostTable({1: 0.5})


def never() -> CostTable:
    raise AssertionError("measured without need")


def test_given_ones():
    found = parse_costs("1=12,4=13.5", never).table
    assert (found(1), found(4)) == (0.012, 0.0135)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("nowhere.json", "expected here, zaya, phi-4-mini"),
        ("1=", "expected .*milliseconds by rows"),
        ("1=-3", "expected .*milliseconds by rows"),
    ],
)
def test_anything_else_is_refused_in_one_line(said: str, message: str):
    with pytest.raises(InvalidRequest, match=message) as raised:
        parse_costs(said, never)
    assert "\n" not in str(raised.value)
