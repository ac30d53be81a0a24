import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints.grammar import MAX_CHARACTERS, MAX_FUNCTIONS, Grammars
from paceline.constraints.tool_calls import parse_tool_calls
from paceline.decoding.generation import Generation
from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Constraint, FinishReason, Logits
from paceline.drafters import create
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.models import ModelFiles, Tokenizer
from paceline.models.gguf_tokenizer import build_tokenizer
from paceline.runtime.model import Model
from support.drafters import Oracle
from support.driver import answer, generation, run
from support.tiny import END, START, TEXT_END, vocabulary
from support.toy import ToyEngine

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

STOPS = (0, 2)
COLUMNS = 328
"""More than the tokenizer has tokens, as models often compute."""

Make = Callable[[], Constraint]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["the rider", "the other"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "const": {"const": {"what is forced": "is all of it", "and": [1, 2.5, None, True]}},
    "choice": {"anyOf": [{"const": "this one"}, {"const": "this other"}, {"type": "null"}]},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{3}$"},
    "references": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"value": {"type": "boolean"}, "next": {"$ref": "#/$defs/end"}},
                "required": ["value", "next"],
                "additionalProperties": False,
            },
            "end": {"type": "null"},
        },
    },
    "white space": {**PERSON, "x-guidance": {"whitespace_pattern": "[ \n]{1,2}"}},
}
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    {
        "name": "weather_at",
        "parameters": {
            "type": "object",
            "properties": {"hour": {"$ref": "#/$defs/hour"}},
            "required": ["hour"],
            "additionalProperties": False,
            "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
        },
    },
    {"name": "now"},
]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "here"}}\n</tool_call>'
AT = '<tool_call>\n{"name": "weather_at", "arguments": {"hour": 21}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


class Unforced:
    """A constraint that forces nothing: every token is picked under its mask."""

    def __init__(self, inner: Constraint) -> None:
        self.masked, self.push = inner.masked, inner.push

    def forced(self, limit: int) -> Sequence[int]:
        return ()

    def allowed_length(self, tokens: Sequence[int]) -> int:
        return len(tokens)


@pytest.fixture(scope="module")
def tokenizer(tiny_files: ModelFiles) -> Tokenizer:
    return tiny_files.tokenizer()


@pytest.fixture(scope="module")
def grammars(tiny_files: ModelFiles) -> Grammars:
    path = tiny_files.folder / "tokenizer.json"
    return Grammars(path, vocab_size=COLUMNS, stop_token_ids=STOPS)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return ToyEngine(vocab_size=COLUMNS, context_length=512, cache_blocks=256)


def settings_for(
    constraint: Constraint, sampling: Sampling, drafter: str = "none", block: int = 8
) -> dict[str, Any]:
    return {
        "constraint": constraint,
        "sampling": sampling,
        "stopping": Stopping(stop_token_ids=frozenset(STOPS)),
        "drafters": create(drafter),
        "policy": Fixed(block),
    }


def allowed(constraint: Constraint, columns: int = COLUMNS) -> set[int]:
    return set(np.flatnonzero(np.isfinite(constraint.masked(np.zeros(columns, np.float32)))))


def follows(constraint: Constraint, tokens: Sequence[int]) -> int:
    """How many of the tokens may come, one after the other; one more if it may end there."""
    for place, token in enumerate(tokens):
        if token not in allowed(constraint):
            return place
        constraint.push(token)
    return len(tokens) + (set(STOPS) <= allowed(constraint))


@pytest.fixture(scope="module")
def takes(tokenizer: Tokenizer) -> Callable[[Constraint, str], bool]:
    """Whether a text may be the whole answer."""

    def takes(constraint: Constraint, text: str) -> bool:
        tokens = tokenizer.encode(text)
        return follows(constraint, tokens) == len(tokens) + 1

    return takes


Takes = Callable[[Constraint, str], bool]


# -- the promise -----------------------------------------------------------------------------------

SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=1), Sampling(temperature=1.5, seed=2)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "hot"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_is_valid_and_the_same_whatever_drafts(
    name: str, sampling: Sampling, grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    prompt = tokenizer.encode("the user and the assistant, the user and the other")
    schema = SCHEMAS[name]
    plain = answer(engine, prompt, **settings_for(Unforced(grammars.json_schema(schema)), sampling))
    assert plain.finish_reason is FinishReason.STOP
    assert plain.tokens[-1] in STOPS
    jsonschema.validate(json.loads(tokenizer.decode(plain.tokens)), schema)
    for drafter, block in product(("none", "ngram", "suffix"), (2, 5, 16)):
        made = settings_for(grammars.json_schema(schema), sampling, drafter, block)
        assert answer(engine, prompt, **made) == plain, (drafter, block)


SMALL = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.integers(0, 50).map(lambda n: {"type": "integer", "minimum": n - 9, "maximum": n + 9}),
        st.integers(0, 5).map(lambda n: {"type": "string", "maxLength": n}),
        st.lists(st.text('the rs"\\é', max_size=5), min_size=1, max_size=3).map(
            lambda words: {"enum": words}
        ),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda it: {
                "type": "array",
                "items": it[0],
                "minItems": it[1],
                "maxItems": it[1] + it[2],
            }
        ),
        st.dictionaries(st.text("the ab", max_size=4), inner, max_size=3).map(
            lambda them: {
                "type": "object",
                "properties": them,
                "required": list(them)[::2],
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda them: {"anyOf": them}),
    ),
    max_leaves=5,
)


@settings(max_examples=30)
@given(schema=SMALL, seed=st.integers(0, 99), drafter=st.sampled_from(["none", "suffix"]))
def test_any_small_schema_is_met(
    schema: dict[str, Any],
    seed: int,
    drafter: str,
    grammars: Grammars,
    engine: Engine,
    tokenizer: Tokenizer,
):
    sampling = Sampling(temperature=1.0, seed=seed)
    made = settings_for(grammars.json_schema(schema), sampling, drafter, 6)
    found = answer(engine, [3, 4, 5], **made)
    jsonschema.validate(json.loads(tokenizer.decode(found.tokens)), schema)
    unforced = Unforced(grammars.json_schema(schema))
    assert answer(engine, [3, 4, 5], **settings_for(unforced, sampling)) == found


def test_answers_made_together_are_those_made_alone(
    grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    def made() -> Iterator[Generation]:
        for seed, (schema, choice) in enumerate(
            product(("person", "pattern"), ("now", "required"))
        ):
            sampling = Sampling(temperature=1.0, seed=seed)
            one = grammars.json_schema(SCHEMAS[schema])
            two = grammars.tools(FUNCTIONS, choice, parallel=False)
            for constraint in (one, two):
                settings = settings_for(constraint, sampling, "suffix")
                yield generation(engine, tokenizer.encode("the one"), **settings)

    assert run(engine, list(made())) == [run(engine, [alone])[0] for alone in made()]


def test_what_is_forced_always_stands_and_takes_one_step(
    grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    schema = SCHEMAS["const"]
    made = generation(
        engine, [5], **settings_for(grammars.json_schema(schema), Sampling(temperature=1.0))
    )
    (found,) = run(engine, [made])
    assert json.loads(tokenizer.decode(found.tokens)) == schema["const"]
    assert made.counters.forced > 20
    # The prompt brings the first token, one step all the others, and the end may take another.
    assert made.counters.steps <= 2


def test_a_guess_that_may_not_come_is_not_tried(
    grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    plain = answer(engine, [5], **settings_for(grammars.regex("[a-z ]{30}"), Sampling()))
    text = [5, *plain.tokens]
    forbidden = tokenizer.encode("!")[-1]
    for place in (2, 3, 5):
        drafters = [Oracle([*text[: place + 1], *[forbidden] * 20])]
        made = settings_for(grammars.regex("[a-z ]{30}"), Sampling(), block=12)
        generated = generation(engine, [5], **{**made, "drafters": drafters})
        assert run(engine, [generated]) == [plain]
        # All that is guessed before the place stands, and nothing is guessed behind it.
        assert generated.counters.drafted == generated.counters.accepted > 0


@pytest.mark.parametrize("extra", [[], [0], [2], [5, 6, 7], [2, 2, 2, 5]])
def test_a_draft_that_goes_on_past_the_end_changes_nothing(
    extra: list[int], grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    plain = answer(engine, [5], **settings_for(grammars.regex("(the|and){2}"), Sampling()))
    text = [5, *plain.tokens[:-1], *extra, *[9] * 8]
    made = settings_for(grammars.regex("(the|and){2}"), Sampling(), block=12)
    assert answer(engine, [5], **{**made, "drafters": [Oracle(text)]}) == plain


@pytest.mark.real_model
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "warm"])
def test_the_default_model_keeps_to_a_schema_whatever_drafts(sampling: Sampling, real_model: Model):
    files, schema = real_model.files, SCHEMAS["person"]
    grammars = Grammars(
        files.folder / "tokenizer.json",
        vocab_size=real_model.engine.vocab_size,
        stop_token_ids=files.stop_token_ids,
    )
    prompt = real_model.tokens("Describe a rider as JSON with name, kind, age and tags.")

    def made(constraint: Constraint, drafter: str) -> Any:
        settings = settings_for(constraint, sampling, drafter)
        settings["stopping"] = Stopping(200, frozenset(files.stop_token_ids))
        return answer(real_model.engine, prompt, **settings)

    plain = made(Unforced(grammars.json_schema(schema)), "none")
    jsonschema.validate(json.loads(files.tokenizer().decode(plain.tokens)), schema)
    for drafter in ("none", "ngram+suffix"):
        assert made(grammars.json_schema(schema), drafter) == plain


# -- the protocol ----------------------------------------------------------------------------------


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


def test_a_mask_leaves_the_row_alone_and_something_to_pick(make: Make):
    constraint = make()
    rng = np.random.default_rng(3)
    for _ in range(60):
        row: Logits = rng.normal(size=COLUMNS).astype(np.float32)
        before = row.copy()
        found = constraint.masked(row)
        assert (row == before).all()
        assert found.dtype == np.float32
        finite = np.isfinite(found)
        assert finite.any()
        assert (found[finite] == row[finite]).all()
        assert (found[~finite] == -np.inf).all()
        constraint.push(int(found.argmax()))


def test_masks_depend_on_the_tokens_and_not_on_what_was_asked(make: Make):
    asked, unasked = make(), make()
    rng = np.random.default_rng(4)
    for place in range(60):
        if place % 3:
            asked.forced(place)
        row = rng.normal(size=COLUMNS).astype(np.float32)
        found = unasked.masked(row)
        assert (asked.masked(row) == found).all()
        assert (asked.masked(row) == found).all()
        token = int(found.argmax())
        asked.push(token)
        unasked.push(token)


def test_forced_tokens_are_at_most_so_many_and_all_there_is(grammars: Grammars):
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


def test_what_a_choice_leaves_no_choice_of_is_forced_at_once(
    grammars: Grammars, tokenizer: Tokenizer
):
    constraint = grammars.regex("[ab] is it[cd] is the user!")
    found = []
    for choice in "ac":
        assert list(constraint.forced(99)) == []
        constraint.push(*tokenizer.encode(choice))
        found.append(tokenizer.decode(constraint.forced(99)))
        for token in list(constraint.forced(99)):
            constraint.push(token)
    assert found == [" is it", " is the user!"]


def test_after_the_end_only_stop_tokens_come(grammars: Grammars, tokenizer: Tokenizer):
    constraint = grammars.json_schema({"const": 7})
    for token in tokenizer.encode("7"):
        assert not allowed(constraint) & set(STOPS)
        constraint.push(token)
    for token in (2, 0, 2, 5):
        assert allowed(constraint) == set(STOPS)
        assert list(constraint.forced(8)) == []
        constraint.push(token)


def test_stop_tokens_may_come_wherever_it_may_end(grammars: Grammars, tokenizer: Tokenizer):
    constraint = grammars.regex("(ab)*")
    assert set(STOPS) < allowed(constraint)
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    constraint.push(a)
    assert not set(STOPS) & allowed(constraint)
    constraint.push(b)
    assert set(STOPS) < allowed(constraint)
    constraint.push(2)
    assert allowed(constraint) == set(STOPS)


def test_an_answer_that_may_not_stop_goes_on_with_nothing_but_stop_tokens(
    grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    made = settings_for(grammars.json_schema({"const": "ab"}), Sampling())
    found = answer(engine, [5], **{**made, "stopping": Stopping(12)})
    assert len(found.tokens) == 12
    assert tokenizer.decode(found.tokens) == '"ab"'


def test_a_token_that_may_not_come_is_an_error_that_names_the_form(grammars: Grammars):
    constraint = grammars.json_schema({"const": 7})
    with pytest.raises(InvalidRequest, match="the JSON schema cannot be followed any further"):
        constraint.push(9)


def test_a_grammar_that_leads_nowhere_is_an_error_when_it_is_met(
    grammars: Grammars, tokenizer: Tokenizer
):
    constraint = grammars.lark('start: "a" | "b" more\nmore: more')
    assert allowed(constraint) == {*tokenizer.encode("a"), *tokenizer.encode("b")}
    constraint.push(*tokenizer.encode("b"))
    with pytest.raises(InvalidRequest, match="any further: no token is allowed"):
        constraint.masked(np.zeros(COLUMNS, np.float32))


def test_columns_beyond_the_tokenizer_never_come(grammars: Grammars, tokenizer: Tokenizer):
    constraint = grammars.regex("(.|\n)*")
    assert max(allowed(constraint)) < tokenizer.vocab_size < COLUMNS


def test_rows_may_be_shorter_than_the_vocabulary(tiny_files: ModelFiles, tokenizer: Tokenizer):
    path = tiny_files.folder / "tokenizer.json"
    columns = tokenizer.vocab_size - 9
    constraint = Grammars(path, vocab_size=columns, stop_token_ids=STOPS).regex("[a-z ]*")
    assert set(STOPS) < allowed(constraint, columns)
    few = Grammars(path, vocab_size=5, stop_token_ids=STOPS).regex("[yz]+")
    with pytest.raises(InvalidRequest, match="no token is allowed"):
        few.masked(np.zeros(5, np.float32))


# -- what may come ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("{}", True),
        ('{"the": [1, -2.5e3, "é\\n", {"a": null}], "": false}', True),
        ("[]", False),
        ('{"a": 1', False),
        ("{'a': 1}", False),
        ("{}{}", False),
    ],
)
def test_a_json_object_is_one(text: str, fits: bool, grammars: Grammars, takes: Takes):
    assert takes(grammars.json_object(), text) is fits


LOOSE = {"properties": {"a": {"items": {"type": "integer"}}}, "type": "object"}


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        (PERSON, '{"name": "a", "kind": "the rider", "age": 3, "tags": []}', True),
        (PERSON, '{"name":"a","kind":"the rider","age":3,"tags":[]}', False),
        (PERSON, '{"name": "a", "kind": "the rider", "age": 131, "tags": []}', False),
        (PERSON, '{"name": "a", "kind": "a rider", "age": 3, "tags": []}', False),
        (PERSON, '{"name": "a", "kind": "the rider", "age": 3}', False),
        ({"type": "integer", "x-guidance": {}}, "12", True),
        ({**LOOSE, "x-guidance": {"whitespace_flexible": True}}, '{\n  "a" : [1,2 ]}', True),
        ({**LOOSE, "x-guidance": {"whitespace_flexible": False}}, '{"a":[1,2]}', True),
        (LOOSE, '{"a": [1, 2]}', True),
        (LOOSE, '{"a":[1,2]}', False),
        ({}, '"anything"', True),
    ],
)
def test_a_schema_says_what_may_come(
    schema: dict[str, Any], text: str, fits: bool, grammars: Grammars, takes: Takes
):
    assert takes(grammars.json_schema(schema), text) is fits


@pytest.mark.parametrize(
    ("text", "fits"), [("ab", True), ("aab", True), ("b", False), ("ab\n", False), ("xab", False)]
)
@pytest.mark.parametrize("expression", ["a+b", "^a+b$"])
def test_an_expression_is_of_the_whole_text(
    expression: str, text: str, fits: bool, grammars: Grammars, takes: Takes
):
    assert takes(grammars.regex(expression), text) is fits


def test_an_expression_may_allow_no_text(grammars: Grammars):
    assert allowed(grammars.regex("")) == set(STOPS)


def test_a_grammar_may_nest(grammars: Grammars, takes: Takes):
    nested = 'start: "a" start "b" | "c"'
    assert takes(grammars.lark(nested), "aacbb")
    assert not takes(grammars.lark(nested), "aacb")


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        (WEATHER, "auto required weather"),
        (AT, "auto required weather_at"),
        (f"{WEATHER}\n{AT}", "auto required"),
        (f"{WEATHER}\n{WEATHER}", "auto required weather"),
        (NOW, "auto required now"),
        (NOW.replace("{}", '{"a": 1}'), ""),
        (AT.replace("21", "24"), ""),
        (WEATHER.replace('"weather"', '"weather_at"'), ""),
        (WEATHER.replace("}}", "}"), ""),
        ("", "auto"),
        ("Just text, with a < and a <tool_call", "auto"),
        (f"Wait: {WEATHER}\nand {AT} and so on", "auto"),
        (f"Wait: {WEATHER}\nand <tool_call> too", ""),
        (f" {WEATHER}", "auto"),
    ],
)
def test_calls_come_where_the_choice_allows(
    text: str, choices: str, grammars: Grammars, takes: Takes
):
    for choice in ("auto", "required", "weather", "weather_at", "now"):
        fits = takes(grammars.tools(FUNCTIONS, choice), text)
        assert fits is (choice in choices.split()), choice


@pytest.mark.parametrize("choice", ["auto", "required", "weather"])
def test_there_may_be_but_one_call(choice: str, grammars: Grammars, takes: Takes):
    assert takes(grammars.tools(FUNCTIONS, choice, parallel=False), WEATHER)
    twice = f"{WEATHER}\n{WEATHER}"
    assert not takes(grammars.tools(FUNCTIONS, choice, parallel=False), twice)
    assert takes(grammars.tools(FUNCTIONS, choice), twice)


@pytest.mark.parametrize("seed", range(4))
def test_forced_calls_can_be_read_back(
    seed: int, grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    constraint = grammars.tools(FUNCTIONS, "required", parallel=False)
    made = settings_for(constraint, Sampling(temperature=2.0, seed=seed), "suffix")
    found = answer(engine, [7, 8], **made)
    content, (call,) = parse_tool_calls(tokenizer.decode(found.tokens))
    assert content == ""
    (function,) = [each for each in FUNCTIONS if each["name"] == call.name]
    jsonschema.validate(json.loads(call.arguments), function.get("parameters", {}))


@pytest.mark.parametrize("name", ['a"b', "a\\n", "a b.c/d", "é 漢", "a\nb", "tool'</tool_call>"])
def test_a_function_may_have_any_name(name: str, grammars: Grammars, takes: Takes):
    call = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)
    text = f"<tool_call>\n{call}\n</tool_call>"
    assert takes(grammars.tools([{"name": name}], "required"), text)
    assert parse_tool_calls(text).calls[0].name == name


# -- tokens of a model's own -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def marked_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny vocabulary, with tokens for the marks and for thoughts, as Qwen's models have."""
    tokens, types, merges = vocabulary()
    tokens[-4:] = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    types[-4:] = [TokenType.USER_DEFINED] * 4
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    path = tmp_path_factory.mktemp("marked") / "tokenizer.json"
    path.write_text(build_tokenizer(path, fields), encoding="utf-8")
    return path


@pytest.mark.parametrize("choice", ["auto", "required", "weather"])
def test_a_model_with_tokens_for_the_marks_says_them_so(choice: str, marked_path: Path):
    tokenizer = Tokenizer(marked_path)
    grammars = Grammars(marked_path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    tokens = tokenizer.encode(f"{WEATHER}\n{WEATHER}", special=True)
    mark = tokenizer.token_id("<tool_call>")
    assert tokens.count(mark) == 2
    assert follows(grammars.tools(FUNCTIONS, choice), tokens) == len(tokens) + 1
    assert follows(grammars.tools(FUNCTIONS, choice, parallel=False), tokens) < len(tokens)
    assert (tokenizer.encode("\n")[0] in allowed(grammars.tools(FUNCTIONS, choice))) is (
        choice == "auto"
    )


def test_free_text_may_hold_any_token_but_those_that_begin_a_call(marked_path: Path):
    tokenizer = Tokenizer(marked_path)
    grammars = Grammars(marked_path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    text = f"<think>the user</think>and {START}then {WEATHER} <think> or </think>"
    tokens = tokenizer.encode(text, special=True)
    assert follows(grammars.tools(FUNCTIONS), tokens) == len(tokens) + 1
    after = grammars.tools(FUNCTIONS)
    mark = tokenizer.token_id("<tool_call>")
    assert mark is not None
    after.push(mark)
    assert allowed(after) == set(tokenizer.encode("\n"))
    strings = allowed(grammars.regex("(.|\n)*"))
    assert not strings & set(tokenizer.encode(f"<think>{START}", special=True))


def test_marks_that_are_control_tokens_are_written_as_text(marked_path: Path, tmp_path: Path):
    parsed = json.loads(marked_path.read_text(encoding="utf-8"))
    for token in parsed["added_tokens"]:
        token["special"] = True
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(parsed), encoding="utf-8")
    grammars = Grammars(path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    tokenizer = Tokenizer(path)
    tokens = tokenizer.encode(WEATHER)
    assert tokenizer.decode(tokens) == WEATHER
    for choice in ("auto", "required"):
        assert follows(grammars.tools(FUNCTIONS, choice), tokens) == len(tokens) + 1
        mark = tokenizer.token_id("<tool_call>")
        assert mark not in allowed(grammars.tools(FUNCTIONS, choice))


def test_free_text_bars_nothing_else(marked_path: Path):
    tokenizer = Tokenizer(marked_path)
    grammars = Grammars(marked_path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    barred = set(range(COLUMNS)) - allowed(grammars.tools(FUNCTIONS))
    # Bytes that begin no character, and the mark that ends a call.
    assert {tokenizer.decode([token]) for token in barred} == {"\ufffd", "</tool_call>"}


@pytest.mark.parametrize(
    "text", ["<think>", f"a{END}b", f"<{START}>", "e\u0301 <think", "</think>\n"]
)
def test_text_that_looks_like_a_token_is_text(text: str, marked_path: Path, engine: Engine):
    tokenizer = Tokenizer(marked_path)
    grammars = Grammars(marked_path, vocab_size=COLUMNS, stop_token_ids=STOPS)
    schema = {"const": {"the user": text}}
    found = answer(engine, [5], **settings_for(grammars.json_schema(schema), Sampling()))
    assert found.finish_reason is FinishReason.STOP
    assert json.loads(tokenizer.decode(found.tokens)) == schema["const"]
    unforced = Unforced(grammars.json_schema(schema))
    assert answer(engine, [5], **settings_for(unforced, Sampling())) == found


def test_tokenizers_with_bytes_to_fall_back_on_work_too(tmp_path: Path, engine: Engine):
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    pieces = ["<s>", "<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*'▁{}":,etho', "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    added = [AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]]
    backend.add_special_tokens(added)
    backend.save(str(tmp_path / "tokenizer.json"))

    grammars = Grammars(tmp_path / "tokenizer.json", vocab_size=COLUMNS, stop_token_ids=STOPS)
    schema = {"const": {"the": "é of the </s>"}}
    found = answer(engine, [5], **settings_for(grammars.json_schema(schema), Sampling()))
    assert (
        json.loads(Tokenizer(tmp_path / "tokenizer.json").decode(found.tokens)) == schema["const"]
    )
    assert vocab["▁the"] in found.tokens


# -- what goes wrong -------------------------------------------------------------------------------

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
            lambda g: g.tools([*FUNCTIONS, {"name": "f", "parameters": {"not": {}}}]),
            "the parameters of the function 'f' cannot",
        ),
        (
            lambda g: g.tools([{"name": "f", "parameters": {"type": "array"}}]),
            "the parameters of the function 'f' are of type 'array'",
        ),
        (lambda g: g.tools([{"name": "f", "parameters": 3}]), "parameters .* is 3"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(
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
def test_a_long_chain_of_rules_ends_no_process(rule: str, grammars: Grammars):
    lines = list(chain(lambda at: rule.format(at, at + 1)))
    name = rule[0]
    text = "\n".join([f"start: {name}0", *lines, f'{name}{len(lines)}: "x"'])
    constraint = grammars.lark(text)
    assert allowed(constraint)


@pytest.mark.parametrize("link", ['{{"$ref":"#/d/{}"}}', '{{"items":{{"$ref":"#/d/{}"}}}}'])
def test_a_long_chain_of_references_ends_no_process(link: str, grammars: Grammars):
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
    with pytest.raises(ModelError, match="not supported by llguidance"):
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
