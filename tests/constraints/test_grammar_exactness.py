"""Constrained responses are valid, and have the same tokens with every drafter."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.constraints.grammar import Grammars
from paceline.decoding.sampling import Sampling
from paceline.decoding.types import FinishReason
from paceline.engines.base import Engine
from paceline.models import Tokenizer
from support.drafters import Oracle
from support.driver import answer, generation, run
from support.grammars import SCHEMAS, STOPS, Unforced, settings_for

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_constrained_response_is_valid_and_the_same_with_every_drafter(
    name: str, grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    sampling = Sampling(temperature=1.0, seed=1)
    prompt = tokenizer.encode("the user and the assistant, the user and the other")
    schema = SCHEMAS[name]
    plain = answer(engine, prompt, **settings_for(Unforced(grammars.json_schema(schema)), sampling))
    assert plain.finish_reason is FinishReason.STOP
    assert plain.tokens[-1] in STOPS
    jsonschema.validate(json.loads(tokenizer.decode(plain.tokens)), schema)
    for drafter, block in (("none", 5), ("ngram", 2), ("suffix", 16)):
        settings = settings_for(grammars.json_schema(schema), sampling, drafter, block)
        assert answer(engine, prompt, **settings) == plain, (drafter, block)


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
def test_responses_match_any_small_schema(
    schema: dict[str, Any],
    seed: int,
    drafter: str,
    grammars: Grammars,
    engine: Engine,
    tokenizer: Tokenizer,
):
    sampling = Sampling(temperature=1.0, seed=seed)
    result = settings_for(grammars.json_schema(schema), sampling, drafter, 6)
    computed = answer(engine, [3, 4, 5], **result)
    jsonschema.validate(json.loads(tokenizer.decode(computed.tokens)), schema)
    unforced = Unforced(grammars.json_schema(schema))
    assert answer(engine, [3, 4, 5], **settings_for(unforced, sampling)) == computed


def test_forced_tokens_are_accepted_in_one_step(
    grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    schema = SCHEMAS["const"]
    request = generation(
        engine, [5], **settings_for(grammars.json_schema(schema), Sampling(temperature=1.0))
    )
    (rows,) = run(engine, [request])
    assert json.loads(tokenizer.decode(rows.tokens)) == schema["const"]
    assert request.counters.forced > 20
    # The prompt brings the first token, one step all the others, and the end may take another.
    assert request.counters.steps <= 2


def test_disallowed_draft_tokens_are_not_verified(
    grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    plain = answer(engine, [5], **settings_for(grammars.regex("[a-z ]{30}"), Sampling()))
    text = [5, *plain.tokens]
    forbidden = tokenizer.encode("!")[-1]
    for place in (2, 5):
        drafters = [Oracle([*text[: place + 1], *[forbidden] * 20])]
        settings = settings_for(grammars.regex("[a-z ]{30}"), Sampling(), block=12)
        generated = generation(engine, [5], **{**settings, "drafters": drafters})
        assert run(engine, [generated]) == [plain]
        # All that is guessed before the place stands, and nothing is guessed behind it.
        assert generated.counters.drafted == generated.counters.accepted > 0


@pytest.mark.parametrize("extra", [[], [2, 2, 5], [5, 6, 7]])
def test_a_draft_past_the_end_changes_no_token(
    extra: list[int], grammars: Grammars, engine: Engine, tokenizer: Tokenizer
):
    plain = answer(engine, [5], **settings_for(grammars.regex("(the|and){2}"), Sampling()))
    text = [5, *plain.tokens[:-1], *extra, *[9] * 8]
    settings = settings_for(grammars.regex("(the|and){2}"), Sampling(), block=12)
    assert answer(engine, [5], **{**settings, "drafters": [Oracle(text)]}) == plain
