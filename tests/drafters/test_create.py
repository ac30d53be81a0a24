from pathlib import Path

import pytest

from paceline.drafters import (
    AnswerHistory,
    DrafterResources,
    DrafterSpec,
    NgramDrafter,
    SuffixDrafter,
    TableDrafter,
    create,
)
from paceline.errors import InvalidRequest
from support.drafters import write_toy_table
from support.errors import raises


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        ("none", []),
        ("ngram", [NgramDrafter]),
        ("ngram:", [NgramDrafter]),
        ("ngram:min=2,max=5", [NgramDrafter]),
        ("suffix", [SuffixDrafter]),
        ("ngram:length=3+suffix", [NgramDrafter, SuffixDrafter]),
        ("suffix+ngram", [SuffixDrafter, NgramDrafter]),
    ],
)
def test_a_spec_names_drafters_in_its_order(spec: str, kinds: list[type]):
    assert [type(drafter) for drafter in create(spec)] == kinds


def test_auto_is_the_default_drafter():
    assert [drafter.name for drafter in create(DrafterSpec.parse("auto").resolve({}))] == ["suffix"]
    assert str(DrafterSpec.parse("auto").resolve({})) == "suffix"
    assert str(DrafterSpec.parse("ngram").resolve({})) == "ngram"


def test_auto_takes_the_table_where_one_comes_with_the_target(toy_table: Path):
    shared = DrafterResources(vocab_size=6, shipped={"table": toy_table})
    spec = DrafterSpec.parse("auto").resolve(shared.shipped)
    assert str(spec) == "suffix+table"
    assert [drafter.name for drafter in create(spec, shared)] == ["suffix", "table"]


def test_a_table_is_named_by_its_folder_or_comes_with_the_target(toy_table: Path):
    named = create(f"table:{toy_table}", DrafterResources(vocab_size=6))
    assert [type(drafter) for drafter in named] == [TableDrafter]
    with raises(InvalidRequest, "tiny"):
        create("table", DrafterResources(target="tiny"))


def test_a_table_is_opened_once_for_all_requests(tmp_path: Path):
    folder = write_toy_table(tmp_path, [[1, 2, 3] * 3], 6)
    shared = DrafterResources(vocab_size=6, shipped={"table": folder})
    create("table", shared)
    for path in folder.iterdir():
        path.unlink()
    assert create("table", shared)


def test_the_options_of_ngram_are_obeyed():
    text = [1, 2, 3, 7, 8, 9, 3, 5, 1, 2, 3]
    assert list(create("ngram:max=1,length=2")[0].propose(text, 9).tokens) == [5, 1]
    assert list(create("ngram:min=2,length=1")[0].propose(text, 9).tokens) == [7]
    assert list(create("ngram:min=4")[0].propose(text, 9).tokens) == []


def test_suffix_searches_earlier_answers_only_on_request():
    history = AnswerHistory()
    history.add([1, 2, 3])
    assert list(
        create("suffix:earlier", DrafterResources(history=history))[0].propose([1, 2], 1).tokens
    ) == [3]
    assert (
        list(create("suffix", DrafterResources(history=history))[0].propose([1, 2], 1).tokens) == []
    )
    assert list(create("suffix:earlier")[0].propose([1, 2], 1).tokens) == []
    parse = DrafterSpec.parse
    assert parse("ngram+suffix:earlier").uses_earlier_answers
    assert not any(parse(spec).uses_earlier_answers for spec in ("none", "auto", "suffix"))


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("eagle", "'eagle'"),
        ("", "''"),
        ("ngram+none", "not none or auto"),
        ("ngram:size=3", "'size'; expected length, max, min"),
        ("ngram:min=3,min=4", "'min'; expected length, max, min, each once"),
        ("kept:min=1", "kept has no option 'min=1'"),
        ("suffix:later", "'later'; expected earlier"),
        ("ngram:min=two", "min is 'two'"),
        ("ngram:min=0", "min=0, max=4"),
        ("ngram:length=0", "length=0; expected 1 to 64"),
        ("suffix+ngram+suffix", "3 parts"),
        ("+".join(f"ngram:length={n}" for n in range(1, 10)), "9 parts"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_by_name(spec: str, value: str):
    for refuse in (DrafterSpec.parse, create):
        with raises(InvalidRequest, value):
            refuse(spec)
