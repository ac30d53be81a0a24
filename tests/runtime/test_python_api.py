"""The Python API: structures, system messages, detokenizing, embeddings."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field

import paceline
from paceline.decoding.costs import CostTable
from paceline.errors import InvalidRequest
from paceline.runtime.model import Model
from support.costs import give_costs
from support.plain import PROMPT
from support.tiny import write_tiny

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "age": {"type": "integer", "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


PETS = ("Rex", "Tom")
GBNF = """# llama.cpp's
root ::= way " " digit{2}
way  ::= "up" | "down"
digit ::= [0-9]
"""


class Pet(BaseModel, extra="forbid"):
    name: Literal["Rex", "Tom"]


class Person(BaseModel, extra="forbid"):
    """A class with a nested class, which its schema references."""

    age: int = Field(ge=0, le=9)
    pet: Pet


class NoSchema(BaseModel):
    run: Callable[[], None]


STRUCTURES: list[tuple[dict[str, Any], Any]] = [
    ({"json_schema": SCHEMA}, lambda text: json.loads(text).keys() == {"name", "age"}),
    ({"regex": "(yes|no), [0-9]{2}"}, re.compile("(yes|no), [0-9]{2}").fullmatch),
    ({"grammar": 'start: "up" | "down"'}, ("up", "down").__contains__),
    ({"json_schema": json.dumps(SCHEMA)}, lambda text: json.loads(text).keys() == {"name", "age"}),
    ({"json_schema": Person}, lambda text: Person.model_validate_json(text).pet.name in PETS),
    ({"grammar": GBNF}, re.compile("(up|down) [0-9]{2}").fullmatch),
]


@pytest.mark.parametrize(
    ("option", "fits"), STRUCTURES, ids=["schema", "regex", "grammar", "text", "class", "GBNF"]
)
def test_a_response_has_the_requested_structure_alone_and_in_a_batch(
    option: Any, fits: Any, model: Model
):
    answer = model.generate(PROMPT, temperature=1.0, seed=5, **option)
    assert fits(answer.text)
    both = model.generate([PROMPT, "Hello"], temperature=1.0, seed=5, **option)
    assert both[0].token_ids == answer.token_ids
    assert fits(both[1].text)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"regex": "(", "max_tokens": 3}, "regular expression"),
        ({"grammar": "begin: 1"}, "grammar"),
        ({"json_schema": {"type": "nothing"}}, "JSON schema"),
        ({"json_schema": "{"}, "json_schema is '{'; expected a JSON schema"),
        ({"json_schema": NoSchema}, "json_schema"),
        ({"grammar": "root ::= nowhere"}, "the grammar is not GBNF: Rule 'nowhere' not found"),
        ({"grammar": "root ::= " + "(" * 9000}, "the grammar is not GBNF"),
        ({"grammar": 'start ::= "a"'}, "the grammar is not GBNF: No 'root' rule found"),
        ({"regex": "a", "grammar": 'start: "a"'}, "regex and grammar"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"system": "a", "raw": True}, "system"),
    ],
)
def test_an_invalid_structure_or_system_message_is_rejected_by_name(
    options: Any, named: str, model: Model
):
    with pytest.raises(InvalidRequest) as error:
        model.generate(PROMPT, **options)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_the_system_option_is_the_system_message(model: Model):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    expected = model.generate(messages, max_tokens=5)
    assert expected.prompt_tokens != model.generate(PROMPT, max_tokens=5).prompt_tokens
    for prompt in (PROMPT, messages[1:]):
        answer = model.generate(prompt, max_tokens=5, system="Be brief.")
        assert answer.token_ids == expected.token_ids
        assert answer.prompt_tokens == expected.prompt_tokens
    with pytest.raises(InvalidRequest):
        model.generate(messages, system="Be long.")


def test_content_may_be_a_list_of_text_parts(model: Model):
    parts = [{"type": "text", "text": text} for text in ("the quick", "brown fox")]
    answer = model.generate([{"role": "user", "content": parts}], max_tokens=5)
    expected = model.generate("the quick\nbrown fox", max_tokens=5)
    assert answer.token_ids == expected.token_ids
    assert answer.prompt_tokens == expected.prompt_tokens


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        *((empty, "prompt is empty") for empty in ("", [], ())),
        *((tokens, "0 to 319") for tokens in ([-1], [320], [1, 10**12])),
        ([1, "x"], ""),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]: is"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "tool", "content": "r", "tool_call_id": "c"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "r"}], ""),
    ],
)
def test_an_invalid_prompt_is_rejected_by_name(prompt: Any, named: str, model: Model):
    with pytest.raises(InvalidRequest) as error:
        model.generate(prompt)
    assert named in str(error.value)


def test_detokenize_is_the_inverse_of_raw_tokens(model: Model):
    assert model.detokenize(model.tokens(PROMPT, raw=True)) == PROMPT
    for wrong in ([-1], [320], ["a"]):
        with pytest.raises(InvalidRequest):
            model.detokenize(wrong)  # type: ignore[arg-type]


@pytest.fixture
def embedder(cache: Path, tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "embedder.gguf", "qwen3", fields={"qwen3.pooling_type": 1})


@pytest.mark.parametrize("embeddings", [True, False])
def test_embeddings_have_length_1_and_are_identical_alone_and_in_a_batch(
    embeddings: bool, embedder: Path
):
    with paceline.load(embedder, cache_tokens=1024, embeddings=embeddings) as model:
        texts = ["the rain", "a", "this is the one " * 9]
        vectors = model.embed(texts)
        assert vectors.shape == (3, model.embed("a").size)
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0)
        for text, vector in zip(texts, vectors, strict=True):
            assert np.array_equal(model.embed(text), vector)
        for wrong in ("", [], ["a", ""], ["a", 3], ["a", "too long " * 999]):
            with pytest.raises(InvalidRequest):
                model.embed(wrong)  # type: ignore[call-overload]


def test_a_model_without_embeddings_raises_an_error(model: Model):
    with pytest.raises(InvalidRequest):
        model.embed("a")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (lambda model: model.settle(), "flush"),
        (lambda model: model.fresh(), "without_history"),
        (lambda model: model.compared(), "exactness_report"),
        (lambda model: [*model.map(["a"], max_tokens=1)], "as_completed"),
        (lambda model: model.conversation().say("a", max_tokens=1).close(), "send"),
        (lambda model: paceline.load(model.files.path, kv="q4_0"), "kv_cache_type"),
    ],
    ids=["settle", "fresh", "compared", "map", "say", "kv"],
)
def test_a_deprecated_name_works_and_warns_with_the_new_one(
    old: Callable[[Model], object], new: str, model: Model
):
    with pytest.warns(DeprecationWarning, match=f"is now `{new}`"), suppress(InvalidRequest):
        old(model)


def test_auto_uses_the_models_current_costs_also_without_history(model: Model):
    prompt, drafted = "this is one and the user, " * 4, []
    for rows in (0.01, 9.0):  # seconds of a call of several rows
        give_costs(model, CostTable({1: 0.01, **dict.fromkeys((2, 8, 32), rows)}))
        for one in (model, model.without_history()):
            answer = one.generate(prompt, max_tokens=40, ignore_eos=True, drafter="suffix")
            drafted.append(answer.stats.drafted > 0)
    assert drafted == [True, True, False, False]


def test_an_old_and_a_new_name_of_one_setting_are_rejected():
    with pytest.raises(TypeError, match="rows is the old name of min_rows"):
        paceline.load("nothing", min_rows=2, rows=1)  # type: ignore[call-arg]
