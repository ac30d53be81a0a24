"""The protocol of a constraint: masks, forced tokens, stop tokens."""

import numpy as np
import pytest

from paceline.constraints.grammar import Grammars
from paceline.decoding.types import Logits
from paceline.errors import InvalidRequest
from paceline.models import ModelFiles, Tokenizer
from support.errors import raises
from support.grammars import COLUMNS, FUNCTIONS, PERSON, STOPS, Make, allowed

pytest.importorskip("llguidance")


@pytest.fixture(
    params=[
        lambda g: g.json_object(),
        lambda g: g.json_schema(PERSON),
        lambda g: g.regex("(the|and)+[0-9]?"),
        lambda g: g.lark('start: "a" start "b" | "c"'),
        lambda g: g.tools(FUNCTIONS),
        lambda g: g.tools(FUNCTIONS, "required"),
    ],
    ids=["object", "schema", "regex", "lark", "auto", "required"],
)
def make(request: pytest.FixtureRequest, grammars: Grammars) -> Make:
    return lambda: request.param(grammars)


def test_a_mask_changes_a_copy_and_allows_a_token(make: Make):
    constraint = make()
    rng = np.random.default_rng(3)
    for _ in range(60):
        row: Logits = rng.normal(size=COLUMNS).astype(np.float32)
        before = row.copy()
        logits = constraint.masked(row)
        assert (row == before).all()
        assert logits.dtype == np.float32
        finite = np.isfinite(logits)
        assert finite.any()
        assert (logits[finite] == row[finite]).all()
        assert (logits[~finite] == -np.inf).all()
        constraint.push(int(logits.argmax()))


def test_forced_returns_at_most_the_requested_number_of_tokens(grammars: Grammars):
    constraint = grammars.regex("the user and [ab]")
    row = np.zeros(COLUMNS, np.float32)
    whole = list(constraint.forced(99))
    assert len(whole) > 2
    for place, token in enumerate(whole):
        assert list(constraint.forced(1)) == whole[place : place + 1]
        assert list(constraint.forced(2)) == whole[place : place + 2]
        assert np.flatnonzero(np.isfinite(constraint.masked(row))).tolist() == [token]
        constraint.push(token)
    assert list(constraint.forced(5)) == []
    assert len(allowed(constraint)) > 1


def test_the_only_continuation_of_a_choice_is_forced_immediately(
    grammars: Grammars, tokenizer: Tokenizer
):
    constraint = grammars.regex("[ab] is it[cd] is the user!")
    results = []
    for choice in "ac":
        assert list(constraint.forced(99)) == []
        constraint.push(*tokenizer.encode(choice))
        results.append(tokenizer.decode(constraint.forced(99)))
        for token in list(constraint.forced(99)):
            constraint.push(token)
    assert results == [" is it", " is the user!"]


def test_after_the_end_only_stop_tokens_are_allowed(grammars: Grammars, tokenizer: Tokenizer):
    constraint = grammars.json_schema({"const": 7})
    for token in tokenizer.encode("7"):
        assert not allowed(constraint) & set(STOPS)
        constraint.push(token)
    for token in (2, 0, 2, 5):
        assert allowed(constraint) == set(STOPS)
        assert list(constraint.forced(8)) == []
        constraint.push(token)


def test_stop_tokens_are_allowed_at_every_possible_end(grammars: Grammars, tokenizer: Tokenizer):
    constraint = grammars.regex("(ab)*")
    assert set(STOPS) < allowed(constraint)
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    constraint.push(a)
    assert not set(STOPS) & allowed(constraint)
    constraint.push(b)
    assert set(STOPS) < allowed(constraint)
    constraint.push(2)
    assert allowed(constraint) == set(STOPS)


def test_pushing_a_disallowed_token_raises(grammars: Grammars):
    constraint = grammars.json_schema({"const": 7})
    with raises(InvalidRequest, "JSON"):
        constraint.push(9)


def test_a_grammar_with_a_dead_end_raises_when_it_is_reached(
    grammars: Grammars, tokenizer: Tokenizer
):
    constraint = grammars.lark('start: "a" | "b" more\nmore: more')
    assert allowed(constraint) == {*tokenizer.encode("a"), *tokenizer.encode("b")}
    constraint.push(*tokenizer.encode("b"))
    with raises(InvalidRequest, "no token"):
        constraint.masked(np.zeros(COLUMNS, np.float32))


def test_rows_may_be_shorter_or_longer_than_the_vocabulary(
    tiny_files: ModelFiles, tokenizer: Tokenizer, grammars: Grammars
):
    path = tiny_files.folder / "tokenizer.json"
    assert max(allowed(grammars.regex("(.|\n)*"))) < tokenizer.vocab_size < COLUMNS
    columns = tokenizer.vocab_size - 9
    constraint = Grammars(path, vocab_size=columns, stop_token_ids=STOPS).regex("[a-z ]*")
    assert set(STOPS) < allowed(constraint, columns)
    few = Grammars(path, vocab_size=5, stop_token_ids=STOPS).regex("[yz]+")
    with raises(InvalidRequest, "no token"):
        few.masked(np.zeros(5, np.float32))
