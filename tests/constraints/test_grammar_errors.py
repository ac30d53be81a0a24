"""Grammars that are rejected: each with one line, none at the cost of the process."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.constraints.grammar import MAX_FUNCTIONS, Grammars
from paceline.constraints.limits import MAX_CHARACTERS
from paceline.decoding.types import Constraint
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.models import ModelFiles
from support.grammars import (
    COLUMNS,
    FUNCTIONS,
    SCHEMAS,
    STOPS,
    allowed,
)
from support.tiny import END, TEXT_END

pytest.importorskip("llguidance")

HUGE = "y" * MAX_CHARACTERS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: g.json_schema({"type": "objekt"}), "JSON schema .*Invalid type: objekt"),
        (lambda g: g.json_schema({"not": {}}), 'JSON schema .*"not"'),
        (lambda g: g.json_schema({"pattern": "(?=a)", "type": "string"}), "look-ahead"),
        (lambda g: g.json_schema({"enum": []}), "Unsatisfiable"),
        (lambda g: g.json_schema({"$ref": "#/nowhere"}), "nowhere"),
        (lambda g: g.json_schema({"const": float("nan")}), "JSON schema is not JSON"),
        (lambda g: g.json_schema({"const": {1, 2}}), "JSON schema is not JSON"),
        (lambda g: g.json_schema([]), r"JSON schema is \[\]; expected an object"),
        (lambda g: g.json_schema({"const": HUGE}), "expected at most 65536"),
        (lambda g: g.json_schema({"x-guidance": 3}), "JSON schema cannot"),
        (lambda g: g.json_schema({"x-guidance": {"nothing": 3}}), "unknown field `nothing`"),
        (lambda g: g.regex("(a"), "regular expression .*unclosed group"),
        (lambda g: g.regex("(" * 9999), "regular expression .*unclosed group"),
        (lambda g: g.regex(HUGE + "y"), "regular expression has 65537 characters"),
        (lambda g: g.regex("\ud800"), "regular expression is not valid Unicode"),
        (lambda g: g.regex("\\bthe"), "regular expression .*lookarounds"),
        (lambda g: g.lark('start: "a" rest'), 'grammar .*unknown name: "rest"'),
        (lambda g: g.lark("start: rest\n\nrest: /(a/"), "grammar .*line 3: unclosed group"),
        (lambda g: g.lark("start: start"), "grammar .*no token is allowed"),
        (lambda g: g.lark('{"grammars": [{"json_schema": {}}]}'), "grammar cannot"),
        (lambda g: g.lark(HUGE + "y"), "grammar has 65537 characters"),
        (lambda g: g.tools([]), "0 functions; expected 1 to 128"),
        (lambda g: g.tools([{"name": "f"}] * (MAX_FUNCTIONS + 1)), "129 functions"),
        (
            lambda g: g.tools(
                [{"name": f"f{n}", "parameters": {"title": HUGE[:60000]}} for n in range(5)]
            ),
            "all functions have 300",
        ),
        (lambda g: g.tools(["f"]), "function 0 has no name"),
        (lambda g: g.tools([{"name": "f"}, {"name": ""}]), "function 1 has no name"),
        (lambda g: g.tools([{"name": "f"}, {"name": "f"}]), "two functions are called 'f'"),
        (lambda g: g.tools(FUNCTIONS, "later"), "no function 'later' to call.*weather_at, now"),
        (
            lambda g: g.tools([*FUNCTIONS, {"name": "f", "parameters": {"properties": 5}}]),
            "the parameters of the function 'f' cannot",
        ),
        (
            lambda g: g.tools([{"name": "f", "parameters": {"type": "array"}}]),
            "the parameters of the function 'f' are of type 'array'",
        ),
        (lambda g: g.tools([{"name": "f", "parameters": 3}]), "parameters .* is 3"),
    ],
)
def test_an_invalid_grammar_is_rejected_in_one_line(
    make: Callable[[Grammars], Constraint], message: str, grammars: Grammars
):
    with pytest.raises(InvalidRequest, match=message) as caught:
        make(grammars)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def chain(link: Callable[[int], str]) -> Iterator[str]:
    """As many links as fit."""
    size, at = 0, 0
    while size < MAX_CHARACTERS - 2000:
        yield link(at)
        size, at = size + len(link(at)) + 4, at + 1


@pytest.mark.parametrize("rule", ["a{}: a{}", 'a{}: ((((((a{} "x")?)?)?)?)?)?', 'A{}: A{} "x"'])
def test_a_long_chain_of_rules_does_not_overflow_the_stack(rule: str, grammars: Grammars):
    lines = list(chain(lambda at: rule.format(at, at + 1)))
    name = rule[0]
    text = "\n".join([f"start: {name}0", *lines, f'{name}{len(lines)}: "x"'])
    constraint = grammars.lark(text)
    assert allowed(constraint)


@pytest.mark.parametrize("link", ['{{"$ref":"#/d/{}"}}', '{{"items":{{"$ref":"#/d/{}"}}}}'])
def test_a_long_chain_of_references_does_not_overflow_the_stack(link: str, grammars: Grammars):
    links = list(chain(lambda at: f'"{at}":{link.format(at + 1)}'))
    text = f'{{"$ref":"#/d/0","d":{{{",".join(links)},"{len(links)}":{{}}}}}}'
    try:
        assert allowed(grammars.json_schema(json.loads(text)))
    except InvalidRequest as error:
        assert "cannot be followed" in str(error)


def test_without_llguidance_the_package_is_named(
    tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    path = tiny_files.folder / "tokenizer.json"
    grammars = Grammars(path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    for make in (grammars.json_object, lambda: grammars.regex("a"), lambda: grammars.lark("a")):
        with pytest.raises(MissingExtra, match=r"pip install llguidance"):
            make()


@pytest.mark.parametrize("stops", [(), (COLUMNS - 1,)])
def test_a_model_whose_answers_cannot_end_is_refused(
    stops: tuple[int, ...], tiny_files: ModelFiles
):
    path = tiny_files.folder / "tokenizer.json"
    with pytest.raises(ModelError, match="no stop token"):
        Grammars(path, vocab_size=COLUMNS, stop_token_ids=stops).json_object()


def test_a_tokenizer_that_the_library_cannot_use_is_refused(tmp_path: Path):
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel

    path = tmp_path / "tokenizer.json"
    Backend(WordLevel({"a": 0, TEXT_END: 1, END: 2}, unk_token="a")).save(str(path))
    with pytest.raises(ModelError, match="llguidance"):
        Grammars(path, vocab_size=3, stop_token_ids=[2]).json_object()


def test_a_tokenizer_that_cuts_texts_short_cuts_no_forced_text(
    tiny_files: ModelFiles, grammars: Grammars, tmp_path: Path
):
    parsed = json.loads((tiny_files.folder / "tokenizer.json").read_text(encoding="utf-8"))
    parsed["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(parsed), encoding="utf-8")
    made = Grammars(path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    forced = grammars.json_schema(SCHEMAS["const"]).forced(99)
    assert len(forced) > 20
    assert made.json_schema(SCHEMAS["const"]).forced(99) == forced


def test_keywords_that_the_library_does_not_know_are_ignored_in_a_functions_parameters(
    grammars: Grammars,
):
    """As in the schemas of agents; the function checks its arguments itself."""
    schema = {"propertyNames": {"pattern": "^a"}, "properties": {"a": {"format": "weird"}}}
    assert grammars.tools([{"name": "f", "parameters": schema}])
    with pytest.raises(InvalidRequest, match="propertyNames"):
        grammars.json_schema(schema)
