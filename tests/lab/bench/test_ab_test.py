"""Comparison on cases, in turns: what a row says, and that it is fair."""

from statistics import median

import pytest

from paceline.options import Options
from paceline.runtime.model import Model
from paceline_lab.bench.ab_test import (
    PLAIN,
    SINGLE_ROW,
    Case,
    Contender,
    drafter_name,
    interleaved,
    measure,
)
from paceline_lab.bench.record import Record, Row, parse_record

PROMPTS = ("Hello", "this is one and the user, this is one and the user", "2 + 2 = 12")


def cases(tokens: int, **options: object) -> list[Case]:
    every: Options = {"max_tokens": tokens, **options}  # type: ignore[typeddict-item]
    return [
        Case(f"p{number}", "chat", prompt, every, {"number": number})
        for number, prompt in enumerate(PROMPTS)
    ]


def plain(model: Model) -> Contender:
    return Contender(PLAIN, model, {"drafter": "none"})


def by_contender(rows: list[Row]) -> dict[str, Row]:
    return {row.contender: row for row in rows}


def test_every_contender_has_a_row_with_values_from_every_round(model: Model):
    contenders = [
        plain(model),
        Contender(SINGLE_ROW, model, {"drafter": "none"}),
        Contender("x", model, {"drafter": "suffix", "policy": "fixed", "max_block": 4}),
    ]
    for case in cases(30):
        rows = measure(case, contenders, rounds=3)
        assert [row.key for row in rows] == [(case.id, each.name) for each in contenders]
        for row in rows:
            assert (row.kind, row.at["number"]) == ("chat", case.at["number"])
            assert row.facts["same_tokens"] is True
            assert row.facts["tokens"] == 30
            assert {len(values) for values in row.measures.values()} == {3}
            assert all(value > 0 for value in row.measures["prefill_tokens_per_second"])
        found = by_contender(rows)
        assert found[PLAIN].measures["ratio"] == [1, 1, 1]
        assert found[SINGLE_ROW].measures["ratio_single_row"] == [1, 1, 1]
        assert found[PLAIN].measures["tokens_per_step"] == [1, 1, 1]
        # Ratios are those of the same round.
        speeds = [found[name].measures["decode_tokens_per_second"] for name in ("x", PLAIN)]
        assert found["x"].measures["ratio"] == [a / b for a, b in zip(*speeds, strict=True)]
        assert "block" not in found[PLAIN].at
        assert (found["x"].at["block"], found["x"].facts["way"]) == (4, "suffix, fixed")
        parse_record(Record("run", rows, made="", command="", paceline="").as_dict(), "it")


def test_counts_are_summed_over_the_rounds(model: Model):
    contenders = [plain(model), Contender("x", model, {"drafter": "suffix", "policy": "fixed"})]
    case = cases(40)[1]
    once, thrice = (by_contender(measure(case, contenders, rounds=n))["x"] for n in (1, 3))
    assert once.counts["accepted"] > 0  # type: ignore[operator]
    for name, count in once.counts.items():
        if isinstance(count, list):
            assert thrice.counts[name] == [3 * each for each in count]
        elif isinstance(count, dict):
            assert thrice.counts[name] == {who: 3 * each for who, each in count.items()}
        else:
            assert thrice.counts[name] == 3 * count
    for name in ("drafted", "accepted"):
        assert sum(once.counts[f"{name}_at"]) == once.counts[name]  # type: ignore[arg-type]
        assert sum(once.counts[f"{name}_by"].values()) == once.counts[name]  # type: ignore[union-attr]


def test_responses_share_no_state_with_earlier_ones(model: Model):
    # With its answers remembered, the second round would need far fewer steps.
    contenders = [
        plain(model),
        Contender("earlier", model, {"drafter": "suffix:earlier", "policy": "fixed"}),
        Contender("not", model, {"drafter": "suffix", "policy": "fixed"}),
    ]
    for case in cases(40):
        found = by_contender(measure(case, contenders, rounds=2))
        steps = found["earlier"].measures["tokens_per_step"]
        assert steps == found["not"].measures["tokens_per_step"]
        assert steps[0] == median(steps)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("suffix+table", "suffix+table"),
        ("suffix+dflash:/some/where/mine", "suffix+dflash:mine"),
        ("model:owner/name", "model:name"),
        ("ngram:min=2,max=4", "ngram:min=2,max=4"),
    ],
)
def test_a_drafters_folder_is_left_out_of_its_label(spec: str, name: str):
    assert drafter_name(spec) == name


@pytest.mark.parametrize(("count", "start"), [(1, 0), (3, 0), (3, 5)])
def test_interleaved_calls_run_once_per_round_in_rotating_order(count: int, start: int):
    names = "abc"[:count]
    told: list[str] = []

    def answer(name: str) -> str:
        told.append(name)
        return f"{name}{told.count(name)}"

    found = interleaved({name: lambda name=name: answer(name) for name in names}, 4, start)
    assert found == {name: [f"{name}{turn}" for turn in (1, 2, 3, 4)] for name in names}
    rounds = [told[at : at + count] for at in range(0, len(told), count)]
    for turn, order in enumerate(rounds, start=start):
        assert sorted(order) == list(names)
        assert order[0] == names[turn % count]
