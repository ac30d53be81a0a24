import math
from pathlib import Path

import pytest

from paceline.bench.compare import PLAIN, SINGLE_ROW, Comparison, Contender, Row, compare
from paceline.bench.suite import load_suite
from paceline.runtime import Model
from support.faulty import FaultyEngine, other_picks_when_drafting


def row(prompt: str, kind: str, contender: str, ratio: float, single: float | None = None) -> Row:
    return Row(prompt, kind, contender, 9, 50.0, 2.0, 0.5, 0.1, 0.2, ratio, single, True)


FOUND = Comparison(
    [
        *(row("a", "chat", name, ratio, 2 * ratio) for name, ratio in ((PLAIN, 1), ("x", 4))),
        *(row("b", "code", name, ratio, 2 * ratio) for name, ratio in ((PLAIN, 1), ("x", 0.5))),
        *(row("c", "code", name, ratio) for name, ratio in ((PLAIN, 1), ("x", 0.5))),
    ]
)


def test_means_are_geometric_over_all_or_over_a_kind():
    assert FOUND.means() == {PLAIN: 1, "x": pytest.approx(1)}
    assert FOUND.means("chat")["x"] == pytest.approx(4)
    assert FOUND.means("code")["x"] == pytest.approx(0.5)
    # Two of the three ran against one row: 8 and 1.
    assert FOUND.means_single_row()["x"] == pytest.approx(math.sqrt(8))


def test_the_worst_prompt_is_that_of_the_least_ratio():
    assert FOUND.worst("x").prompt == "b"
    assert FOUND.kinds == ["chat", "code"]
    assert FOUND.contenders == [PLAIN, "x"]


def test_as_json_there_is_everything():
    value = FOUND.as_dict()
    assert value["worst"] == {PLAIN: 1, "x": 0.5}
    assert value["by_kind"]["code"]["x"] == pytest.approx(0.5)
    assert len(value["rows"]) == 6
    assert value["rows"][1]["contender"] == "x"


def test_every_contender_answers_every_prompt_with_plain_decodings_tokens(
    model: Model, suite_file: Path
):
    told: list[str] = []
    found = compare(
        load_suite(suite_file),
        [
            Contender(PLAIN, model, {"drafter": "none"}),
            Contender(SINGLE_ROW, model, {"drafter": "none"}),
            Contender("suffix", model, {"drafter": "suffix", "policy": "fixed"}),
        ],
        rounds=2,
        max_tokens=30,
        watch=told.append,
    )
    assert [(row.prompt, row.contender) for row in found.rows] == [
        (prompt, name)
        for prompt in ("one", "two", "three")
        for name in (PLAIN, SINGLE_ROW, "suffix")
    ]
    assert len(told) == 3
    for each in found.rows:
        assert each.same_tokens
        assert each.tokens == 30
        assert each.tokens_per_second > 0
        assert each.ratio_single_row is not None
        if each.contender == PLAIN:
            assert each.ratio == 1
            assert each.tokens_per_step == 1
        if each.contender == "suffix":
            assert each.acceptance_rate > 0


def test_without_a_single_row_contender_there_is_no_second_ratio(model: Model, suite_file: Path):
    contenders = [Contender(PLAIN, model, {"drafter": "none"})]
    found = compare(load_suite(suite_file).only([], 1), contenders, rounds=1, max_tokens=2)
    assert all(row.ratio_single_row is None for row in found.rows)
    assert found.means_single_row() == {}


def test_answers_of_one_token_have_no_speed_and_are_no_obstacle(model: Model, suite_file: Path):
    contenders = [Contender(PLAIN, model, {}), Contender("ngram", model, {"drafter": "ngram"})]
    found = compare(load_suite(suite_file), contenders, rounds=1, max_tokens=1)
    assert {row.ratio for row in found.rows} == {1.0}
    assert {row.tokens for row in found.rows} == {1}


def test_a_contender_with_other_tokens_is_found_out(model: Model, suite_file: Path):
    liar = Model(model.files, FaultyEngine(model.engine, other_picks_when_drafting))
    found = compare(
        load_suite(suite_file),
        [
            Contender(PLAIN, model, {"drafter": "none"}),
            Contender("liar", liar, {"drafter": "suffix", "policy": "fixed"}),
        ],
        rounds=1,
        max_tokens=60,
    )
    same = {
        name: [r.same_tokens for r in found.rows if r.contender == name] for name in (PLAIN, "liar")
    }
    assert same[PLAIN] == [True] * 3
    assert False in same["liar"]


def test_an_answer_knows_nothing_of_those_before_it(model: Model, suite_file: Path):
    # With its answers remembered, the second round would need far fewer steps.
    contenders = [
        Contender(PLAIN, model, {"drafter": "none"}),
        Contender("earlier", model, {"drafter": "suffix:earlier", "policy": "fixed"}),
        Contender("not", model, {"drafter": "suffix", "policy": "fixed"}),
    ]
    found = compare(load_suite(suite_file), contenders, rounds=2, max_tokens=40)
    steps = {
        name: [r.tokens_per_step for r in found.rows if r.contender == name]
        for name in ("earlier", "not")
    }
    assert steps["earlier"] == steps["not"]
