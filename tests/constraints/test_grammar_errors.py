"""Rejected grammars: each raises a one-line error, and none crashes the process."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.constraints.grammar import MAX_CHARACTERS, MAX_FUNCTIONS, Grammars
from paceline.decoding.types import Constraint
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.models import ModelFiles
from support.errors import raises
from support.grammars import COLUMNS, FUNCTIONS, SCHEMAS, STOPS, allowed
from support.tiny import END, TEXT_END

pytest.importorskip("llguidance")

HUGE = "y" * MAX_CHARACTERS


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda g: g.json_schema({"type": "objekt"}), "objekt"),
        (lambda g: g.json_schema({"not": {}}), '"not"'),
        (lambda g: g.json_schema({"pattern": "(?=a)", "type": "string"}), "look-ahead"),
        (lambda g: g.json_schema({"enum": []}), "Unsatisfiable"),
        (lambda g: g.json_schema({"$ref": "#/nowhere"}), "nowhere"),
        (lambda g: g.json_schema({"const": float("nan")}), "JSON schema"),
        (lambda g: g.json_schema([]), "JSON schema is []"),
        (lambda g: g.json_schema({"const": HUGE}), "65536"),
        (lambda g: g.regex("(a"), "regular expression"),
        (lambda g: g.regex("\ud800"), "regular expression"),
        (lambda g: g.regex("\\bthe"), "lookarounds"),
        (lambda g: g.lark('start: "a" rest'), '"rest"'),
        (lambda g: g.lark("start: rest\n\nrest: /(a/"), "line 3"),
        (lambda g: g.lark("start: start"), "no token"),
        (lambda g: g.lark('{"grammars": [{"json_schema": {}}]}'), "grammar"),
        (lambda g: g.tools([]), "1 to 128"),
        (lambda g: g.tools([{"name": "f"}] * (MAX_FUNCTIONS + 1)), "129 functions"),
        (
            lambda g: g.tools(
                [{"name": f"f{n}", "parameters": {"title": HUGE[:60000]}} for n in range(5)]
            ),
            "300",
        ),
        (lambda g: g.tools([{"name": "f"}, {"name": ""}]), "function 1"),
        (lambda g: g.tools([{"name": "f"}, {"name": "f"}]), "'f'"),
        (lambda g: g.tools(FUNCTIONS, "later"), "weather_at, now"),
        (lambda g: g.tools([*FUNCTIONS, {"name": "f", "parameters": {"properties": 5}}]), "'f'"),
        (lambda g: g.tools([{"name": "f", "parameters": {"type": "array"}}]), "'array'"),
    ],
)
def test_an_invalid_grammar_is_rejected_with_a_one_line_error(
    make: Callable[[Grammars], Constraint], cause: str, grammars: Grammars
):
    with raises(InvalidRequest, cause) as caught:
        make(grammars)
    assert len(str(caught.value)) < 400


def chain(link: Callable[[int], str]) -> Iterator[str]:
    """Return a chain of rules of the maximum length."""
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


def test_missing_llguidance_is_named(tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    path = tiny_files.folder / "tokenizer.json"
    grammars = Grammars(path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    for make in (grammars.json_object, lambda: grammars.regex("a"), lambda: grammars.lark("a")):
        with raises(MissingExtra, "llguidance"):
            make()


@pytest.mark.parametrize("stops", [(), (COLUMNS - 1,)])
def test_a_model_without_stop_tokens_is_rejected(stops: tuple[int, ...], tiny_files: ModelFiles):
    path = tiny_files.folder / "tokenizer.json"
    with raises(ModelError, "stop token"):
        Grammars(path, vocab_size=COLUMNS, stop_token_ids=stops).json_object()


def test_an_unsupported_tokenizer_is_rejected(tmp_path: Path):
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel

    path = tmp_path / "tokenizer.json"
    Backend(WordLevel({"a": 0, TEXT_END: 1, END: 2}, unk_token="a")).save(str(path))
    with raises(ModelError, "llguidance"):
        Grammars(path, vocab_size=3, stop_token_ids=[2]).json_object()


def test_a_truncating_tokenizer_does_not_shorten_forced_text(
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
    compiler = Grammars(path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    forced = grammars.json_schema(SCHEMAS["const"]).forced(99)
    assert len(forced) > 20
    assert compiler.json_schema(SCHEMAS["const"]).forced(99) == forced
