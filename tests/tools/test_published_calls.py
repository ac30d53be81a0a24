"""Calls written by published chat templates, which models were trained on, are parsed."""

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from paceline.models import ChatTemplate
from paceline.runtime.tool_messages import fit_calls
from paceline.tools.calls import ToolCall, written_calls
from paceline.tools.forms import ToolForm, tool_form
from support.published import llama_cpp_models
from support.tool_calls import parse_tool_calls, streamed

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

FORMS = {
    "apertus": ["Apertus-8B-Instruct"],
    "apriel": ["Apriel-1.6-15b-Thinker-fixed", "unsloth-Apriel-1.5"],
    "deepseek": ["deepseek-ai-DeepSeek-V3.1"],
    "deepseek-fenced": ["llama-cpp-deepseek-r1"],
    "deepseek-xml": ["deepseek-ai-DeepSeek-V3.2"],
    "gemma": ["google-gemma-4-31B-it-interleaved", "google-gemma-4-31B-it"],
    "glm": ["GLM-4.6", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2"],
    "glm-compact": ["GLM-4.7-Flash", "poolside-Laguna-S-2.1"],
    "granite": ["ibm-granite-granite-3.3-2B-Instruct"],
    "hermes": [
        *("Bielik-11B-v3.0-Instruct", "MiMo-VL", "Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct"),
        *("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "Reka-Edge", "Qwen-Qwen3-0.6B"),
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        *("ibm-granite-granite-4.0", "ibm-granite-granite-4.1"),
    ],
    "kimi": ["Kimi-K2-Instruct", "Kimi-K2-Thinking", "moonshotai-Kimi-K2"],
    "lfm2": ["LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct"],
    "minicpm": ["openbmb-MiniCPM5-1B"],
    "minimax": ["MiniMax-M2"],
    "mistral": ["mistralai-Mistral-Nemo-Instruct-2407"],
    "mistral-args": [
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "unsloth-mistral-Devstral-Small-2507",
    ],
    "mistral-ids": ["Mistral-Small-3.2-24B-Instruct-2506"],
    "nemotron": ["NVIDIA-Nemotron-Nano-v2"],
    "qwen-xml": [
        *("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Coder", "Qwen3.5-4B", "StepFun3.5-Flash")
    ],
    "seed": ["ByteDance-Seed-OSS"],
}
"""The form of a model's calls; harmony and Llama, whose calls have no mark, are not here."""
NO_LINE_BETWEEN = {"Reka-Edge", "StepFun3.5-Flash"}
"""Their templates have no line break between two calls, where other models of the form have one."""
SINGLE_QUOTES = {"LFM2.5-8B-A1B"}
"""Its template puts strings in single quotes without escapes, so the end of a value with such a
quote or a backslash is ambiguous."""
IDS = re.compile(r', "id": "[^"]*"|(?<=\[CALL_ID\])[a-z0-9]{9}')
USER = {"role": "user", "content": "QUESTION_1"}
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**9), 10**9),
        st.floats(-1e9, 1e9).filter(lambda value: value == round(value, 3)),
        st.text("ab \"'\\\n,=(){}[]:<>|&é漢😀", min_size=1, max_size=8).map(lambda x: f"x{x}x"),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "key", "größe"]), inner, max_size=3),
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days_2", "b"]), VALUES, max_size=3)


MODELS = [(form, name) for form in FORMS for name in FORMS[form]]
Published = tuple[str, str, ToolForm, ChatTemplate]
"""A model, its template's text, its form, and its template."""


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def published(request: pytest.FixtureRequest) -> Published:
    name, model = request.param
    source = (llama_cpp_models() / "templates" / f"{model}.jinja").read_text("utf-8")
    form = tool_form(source)
    assert form is not None, f"the form of {model} is not recognised"
    assert form.name == name
    return model, source, form, ChatTemplate(source)


def rendered(
    published: Published, calls: list[tuple[str, dict[str, Any]]], functions: dict[str, Any]
) -> str:
    """The prompt of a chat with these calls, from after the question on."""
    _, source, form, template = published
    tools = [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
        for name, schema in functions.items()
    ]
    result = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": values}}
        for place, (name, values) in enumerate(calls)
    ]
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": result}]
    chat += [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in result]
    fitted = fit_calls(chat, form, source)
    prompt = template.render(fitted, tools=tools, add_generation_prompt=False)
    return prompt[prompt.index("QUESTION_1") :]


@pytest.mark.parametrize("count", [1, 2])
def test_calls_are_written_like_the_published_template(count: int, published: Published):
    """So a grammar, which allows these texts, forces no model away from its training."""
    model, _, form, _ = published
    calls: list[tuple[str, dict[str, Any]]] = [
        ("f", {"city": "Linz", "days": 3}),
        ("f", {"b": "x"}),
    ]
    types = {"city": {"type": "string"}, "days": {"type": "integer"}, "b": {"type": "string"}}
    answer = rendered(published, calls[:count], {"f": {"type": "object", "properties": types}})
    written = written_calls(form, [ToolCall(name, json.dumps(v)) for name, v in calls[:count]])
    if model in NO_LINE_BETWEEN:
        written = written.replace(form.close + form.separator + form.mark, form.close + form.mark)
    if model in SINGLE_QUOTES:
        written = written.replace('"', "'")
    assert IDS.sub("", written) in IDS.sub("", answer)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=2))
def test_calls_written_by_the_published_template_are_parsed(
    arguments: list[dict[str, Any]], published: Published
):
    model, _, form, _ = published
    # Nobody can read back where a string ends that has the mark of its end.
    assume(not form.quote or form.quote not in repr(arguments))
    if model in SINGLE_QUOTES:
        arguments = [
            {
                key: re.sub(r"['\\]", "", value) if isinstance(value, str) else value
                for key, value in values.items()
            }
            for values in arguments
        ]
    calls = [
        ("get_weather" if place else "now", argument) for place, argument in enumerate(arguments)
    ]
    functions: dict[str, Any] = {}
    for name, values in calls:
        properties = {
            key: {"type": "string"} if isinstance(value, str) else {}
            for key, value in values.items()
        }
        functions[name] = {"type": "object", "properties": properties}
    answer = rendered(published, calls, functions)
    result = parse_tool_calls(answer, form, functions)
    assert [(call.name, json.loads(call.arguments)) for call in result.calls] == calls, answer
    pieces = streamed([*answer], form, functions)
    assert [(call.name, json.loads(call.arguments)) for call in pieces.calls] == calls, answer
