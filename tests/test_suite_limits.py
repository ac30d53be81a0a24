"""The test suite itself: no test can hang for ever."""

from itertools import combinations, product

import pytest

from support.pairs import pairs


def test_every_test_has_a_timeout(request: pytest.FixtureRequest):
    config = request.config
    assert float(config.getini("timeout")) <= 300
    assert config.getini("faulthandler_exit_on_timeout")


def test_any_two_values_of_different_axes_meet_in_a_row_of_pairs():
    axes = ["abcde", range(4), "xyz", (True, False)]
    rows = pairs(*axes)
    for (i, one), (j, other) in combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == {*product(one, other)}
    assert len(rows) <= 22  # of 120; the two longest axes alone need 20
    assert rows == pairs(*axes)
