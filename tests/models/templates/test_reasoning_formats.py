"""Reasoning formats of templates, detected in short templates with the tags of public ones."""

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.models import ModelFiles
from paceline.models.templates import ChatTemplate
from paceline.models.templates.marks import Thinking
from paceline.models.templates.tokenizer import Tokenizer
from support.errors import raises
from support.thinking import TEMPLATES

USER = [{"role": "user", "content": "is <think> a mark?"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_files: ModelFiles) -> Tokenizer:
    return tiny_files.tokenizer


def thinking(name: str, tokenizer: Tokenizer) -> Thinking:
    return Thinking(TEMPLATES[name], tokenizer, "tiny")


def ends_inside(name: str, tokenizer: Tokenizer, **variables: Any) -> bool:
    template = ChatTemplate(TEMPLATES[name])
    result = thinking(name, tokenizer)
    prompt = template.render(USER, **variables)
    return result.ends_in_reasoning(
        prompt, lambda: template.render(USER, **variables, add_generation_prompt=False)
    )


def test_a_template_in_an_unknown_format_has_no_reasoning(tiny_files: ModelFiles):
    assert tiny_files.thinking.form is None
    assert tiny_files.thinking.switch(False) == {}
    with raises(InvalidRequest):
        tiny_files.thinking.switch(True)
    assert Thinking(None, tiny_files.tokenizer, "tiny").form is None
    assert Thinking("<reasoning>{{ x }}", tiny_files.tokenizer, "tiny").form is None
    # Harmony's marks have to be tokens, which they are not here.
    assert Thinking("<|channel|>{{ x }}", tiny_files.tokenizer, "tiny").form is None


@pytest.mark.parametrize(
    ("name", "opens", "on", "off"),
    [
        ("qwen3", "<think>", {"enable_thinking": True}, {"enable_thinking": False}),
        ("smollm3", "<think>", {"enable_thinking": True}, {"enable_thinking": False}),
        ("gemma4", "<|channel>", {"enable_thinking": True}, {"enable_thinking": False}),
        ("granite-3.2", "Here is my thought process:", {"thinking": True}, {"thinking": False}),
        ("granite-3.3", "<think>", {"thinking": True}, {"thinking": False}),
        ("seed-oss", "<seed:think>", {}, {"thinking_budget": 0}),
        ("deepseek-r1", "<think>", {}, None),
        ("magistral", "[THINK]", {}, None),
    ],
)
def test_reasoning_delimiters_and_switches_are_detected_in_the_template(
    name: str, opens: str, on: dict[str, Any], off: dict[str, Any] | None, tokenizer: Tokenizer
):
    result = thinking(name, tokenizer)
    assert result.form is not None
    assert result.form.opens[0] == opens
    assert result.switch(True) == on
    if off is None:
        with raises(InvalidRequest, "tiny"):
            result.switch(False)
        with raises(InvalidRequest, "tiny"):
            result.effort("none")
    else:
        assert result.switch(False) == result.effort("none") == off
    assert result.effort("high") == {"reasoning_effort": "high", **on}
    around = ("<response>", "</response>") if name == "granite-3.3" else None
    assert result.wrap == around


def test_reasoning_is_turned_off_with_the_templates_variable(tokenizer: Tokenizer):
    source = "</think>{% if reasoning_effort == 'none' %}a{% endif %}"
    thinking = Thinking(source, tokenizer, "tiny")
    assert thinking.switch(False) == {"reasoning_effort": "none"}
    for condition, word in (
        ("reasoning_effort is none", "tiny"),
        ("'/no_think' in messages[-1].content", "/no_think"),
    ):
        source = f"<think></think>{{% if {condition} %}}a{{% endif %}}"
        with raises(InvalidRequest, word):
            Thinking(source, tokenizer, "tiny").switch(False)


@pytest.mark.parametrize(
    ("name", "variables", "expected"),
    [
        ("qwen3", {}, False),
        ("deepseek-r1", {}, True),
        ("gemma4", {"enable_thinking": True}, False),
        ("gemma4", {"enable_thinking": False}, False),
        ("seed-oss", {"thinking_budget": 0}, True),
        ("granite-3.2", {"thinking": True}, False),
    ],
)
def test_a_prompt_ends_in_reasoning_only_if_the_template_opens_it(
    name: str, variables: dict[str, Any], expected: bool, tokenizer: Tokenizer
):
    assert ends_inside(name, tokenizer, **variables) is expected


def test_earlier_reasoning_is_passed_under_the_names_the_template_reads(tokenizer: Tokenizer):
    def remembered(source: str) -> dict[str, str]:
        return Thinking(source, tokenizer, "tiny").message_fields("hm")

    assert remembered("{{ message.reasoning_content }}") == {"reasoning_content": "hm"}
    assert remembered("{{ message['thinking'] }}") == {"reasoning_content": "hm", "thinking": "hm"}
    assert remembered("{{ m.get('reasoning') }} thinking") == {
        "reasoning_content": "hm",
        "reasoning": "hm",
    }
    assert Thinking("", tokenizer, "tiny").message_fields("") == {}


def test_reasoning_tags_are_found_by_token_id(thinking_gguf: Path, tiny_cache: Path):
    from paceline.models import resolve

    files = resolve(str(thinking_gguf), tiny_cache)
    thinking = files.thinking
    assert thinking.form is not None
    marks = thinking.tokens_of(thinking.form)
    assert sorted(marks.values()) == ["</think>", "<think>"]
    text = files.tokenizer.decode([*marks, 100])
    assert "think" not in text, "decoding leaves them out"
