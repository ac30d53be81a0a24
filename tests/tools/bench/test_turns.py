import pytest

from paceline.tools.bench.interleave import in_turns


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_in_every_round_all_have_a_turn_and_who_begins_moves_on(count: int, start: int):
    names = "abc"[:count]
    told: list[str] = []

    def answer(name: str) -> str:
        told.append(name)
        return f"{name}{told.count(name)}"

    found = in_turns({name: lambda name=name: answer(name) for name in names}, 4, start)
    assert found == {name: [f"{name}{turn}" for turn in (1, 2, 3, 4)] for name in names}
    rounds = [told[at : at + count] for at in range(0, len(told), count)]
    for turn, order in enumerate(rounds, start=start):
        assert sorted(order) == list(names)
        assert order[0] == names[turn % count]


def test_no_rounds_give_nothing():
    assert in_turns({"a": lambda: 1}, 0) == {"a": []}
