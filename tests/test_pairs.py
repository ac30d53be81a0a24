"""All-pairs coverage: rows of values in place of all combinations."""

from itertools import combinations, product

from support.pairs import pairs


def test_any_two_values_of_different_parameters_share_a_row():
    axes = ["abcde", range(4), "xyz", (True, False)]
    rows = pairs(*axes)
    for (i, one), (j, other) in combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == {*product(one, other)}
    assert len(rows) <= 22  # of 120; the two longest axes alone need 20
    assert rows == pairs(*axes)
