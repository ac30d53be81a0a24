import datetime
import json
from typing import Any

import pytest

from paceline.errors import InvalidRequest, ModelError
from paceline.models import ChatTemplate
from support.errors import raises

USER = [{"role": "user", "content": "Hi"}]


def rendered(source: str, messages: Any = USER, **names: Any) -> str:
    return ChatTemplate(source, model="tiny").render(messages, **names)


# What gives an attacker the interpreter, were it not for the sandbox.
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ ''.format_map.__self__.__class__ }}",
    "{{ messages.insert(0, 1) }}",
    "{{ messages[0].update({'content': 'other'}) }}",
    "{% include '/etc/passwd' %}",
    "{{ range(10 ** 9) | list }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_known_sandbox_escapes_fail_in_a_template(source: str):
    messages = [dict(item) for item in USER]
    with raises((ModelError, InvalidRequest)):
        text = rendered(source, messages)
        # An attribute that the sandbox hides is undefined, and nothing comes of it.
        assert "class" not in text
        assert text.strip() == ""
        raise InvalidRequest("it came to nothing")
    assert messages == USER


def test_tojson_writes_json_as_in_model_training():
    tools = [{"name": "größe", "note": "<a & 'b'>"}]
    assert rendered("{{ tools | tojson }}", tools=tools) == json.dumps(tools, ensure_ascii=False)
    indented = rendered("{{ tools | tojson(indent=2) }}", tools=tools)
    assert indented == json.dumps(tools, ensure_ascii=False, indent=2)
    assert "\\u00f6" in rendered("{{ tools | tojson(ensure_ascii=true) }}", tools=tools)
    assert rendered("{{ messages | map(attribute='content') | tojson }}") == '["Hi"]'


def test_a_template_may_modify_lists_without_changing_the_callers():
    messages = [dict(item) for item in USER]
    source = "{% set n = namespace(ids=[]) %}{% set _ = n.ids.append('a') %}"
    source += "{% set _ = messages.append(n.ids.pop(0)) %}{{ n.ids }}{{ messages[-1] }}"
    assert rendered(source, messages) == rendered(source, messages) == "[]a"
    assert messages == USER


_TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
SYSTEM = {"role": "system", "content": "Be brief"}


def test_a_rejected_system_message_moves_to_the_first_user_turn():
    source = _NO_SYSTEM + _TURNS
    assert rendered(source, [SYSTEM, *USER]) == "[user] Be brief\n\nHi"
    assert rendered(source, [SYSTEM]) == "[user] Be brief"
    assert rendered(_TURNS, [SYSTEM, *USER]) == "[system] Be brief[user] Hi"
    answer = {"role": "assistant", "content": "Hi"}
    assert rendered(source, [SYSTEM, answer]) == "[user] Be brief[assistant] Hi"
    with raises(InvalidRequest, "no system"):
        rendered("{{ raise_exception(messages[0].role ~ ': no system') }}", [SYSTEM, *USER])


def test_a_template_that_concatenates_arguments_gets_them_as_text():
    arguments = {"city": "Köln"}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    source = "{% for c in messages[-1].tool_calls %}{{ 'f' + c.function.arguments }}{% endfor %}"
    assert rendered(source, messages) == 'f{"city": "Köln"}'
    assert rendered("{{ messages[-1].tool_calls[0].function.arguments.city }}", messages) == "Köln"


def test_strftime_now_returns_the_current_date():
    before = datetime.datetime.now().astimezone().strftime("%d %b %Y")
    text = rendered("{{ strftime_now('%d %b %Y') }}")
    assert text in (before, datetime.datetime.now().astimezone().strftime("%d %b %Y"))


EACH = "{% for m in messages %}{{ m.content }}"
TAGS = ["{% for m in messages %}", "    {% if true %}", "{{ m.content }}", "    {% endif %}"]


@pytest.mark.parametrize(
    ("source", "names", "text"),
    [
        ("{% for tool in tools %}{{ tool }}{% endfor %}" + _TURNS, {}, "[user] Hi"),
        ("{{ tools is none }}", {}, "True"),
        ("{{ enable_thinking }}", {"enable_thinking": False}, "False"),
        ("{{ bos_token }}", {"bos_token": "<evil>"}, ""),
        (EACH + "{% if m.role == 'user' %}{% break %}{% endif %}{% endfor %}", {}, "Hi"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", {}, "Hi"),
        ("\n".join([*TAGS, "{% endfor %}"]), {}, "Hi\n"),  # lines of tags alone are none
    ],
)
def test_templates_have_the_functions_of_transformers(
    source: str, names: dict[str, Any], text: str
):
    assert rendered(source, **names) == text


@pytest.mark.parametrize(
    "messages",
    [[], "text", [{}], [{"content": "x"}], [{"role": 3}], ["x"], [None], None, {"role": "user"}],
)
def test_invalid_messages_are_rejected(messages: Any):
    with raises(InvalidRequest, "message"):
        rendered("x", messages)


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        # The messages are wrong: in the template's words, or in ours.
        (
            "{{ raise_exception('roles must alternate') }}",
            InvalidRequest,
            ("roles must alternate",),
        ),
        ("{{ messages[0].content + 1 }}", InvalidRequest, ("tiny", "cannot")),
        ("{{ messages[0].content.parts.x }}", InvalidRequest, ("tiny", "field")),
        # The template is.
        ("{{ 1 / 0 }}", ModelError, ("tiny",)),
        ("{{ 'a' | nofilter }}", ModelError, ("tiny",)),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ModelError, ("tiny",)),
        ("{{", ModelError, ("tiny", "--raw")),
        ("{% if %}", ModelError, ("tiny", "--raw")),
        ("{% endfor %}", ModelError, ("tiny", "--raw")),
        (None, ModelError, ("tiny", "--raw")),
    ],
)
def test_unrenderable_messages_and_templates_are_rejected(
    source: Any, kind: type[Exception], words: tuple[str, ...]
):
    with raises(kind, *words):
        template = ChatTemplate(source, model="tiny")  # which is read at once
        assert "--raw" not in words
        template.render(USER)


def test_a_template_gets_the_special_tokens_and_the_generation_prompt_flag():
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ add_generation_prompt }}"
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert template.render(USER) == "<s>Hi</s>True"
    assert template.render(USER, add_generation_prompt=False) == "<s>Hi</s>False"
    assert ChatTemplate(source).render(USER) == "HiTrue"
