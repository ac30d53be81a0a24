"""Orders of roles that a template rejects, moves or drops, with invented templates."""

from typing import Any

import pytest

from paceline.models import ChatTemplate

_EACH = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
_RAISE = "{{ raise_exception('no') }}"
ANY = _EACH
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    + _RAISE
    + "{% endif %}{% endfor %}"
    + _EACH
)
"""Qwen3.5 rejects a system turn that is not the first."""
DROPS = (
    "{% if messages[0].role == 'system' %}[system] {{ messages[0].content }}{% endif %}"
    + _EACH.replace(" %}[", " if m.role != 'system' %}[")
)
"""gpt-oss renders the first one, and no other."""
MOVES = (
    "{% for m in messages if m.role == 'system' %}[system] {{ m.content }}{% endfor %}"
    + _EACH.replace(" %}[", " if m.role != 'system' %}[")
)
"""DeepSeek V3.1 has all of them first."""
_ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + _RAISE
    + "{% endif %}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content ~ '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    + _ALTERNATE
    + "{% for m in messages %}[{{ m.role }}] {{ first if loop.first }}{{ m.content }}{% endfor %}"
)
"""Gemma 3: the system's text is the user's."""
MISTRAL = (
    "{% set n = namespace(at=0) %}"
    "{% for m in messages if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (n.at % 2 == 0) or m.role == 'assistant' and not m.content %}"
    + _RAISE
    + "{% endif %}{% set n.at = n.at + 1 %}{% endfor %}"
    + _EACH
)
"""Ministral 3: calls and results do not count, and no answer is empty."""

CHAT = [("system", "S"), ("system", "T"), ("user", "x"), ("assistant", "a"), ("system", "L")]
CALL: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
LATE = "<instructions>\nL\n</instructions>"


def chat_of(*turns: tuple[str, str] | dict[str, Any]) -> list[dict[str, Any]]:
    return [
        turn if isinstance(turn, dict) else {"role": turn[0], "content": turn[1]} for turn in turns
    ]


def rendered(source: str, *turns: tuple[str, str] | dict[str, Any]) -> str:
    return ChatTemplate(source).render(chat_of(*turns))


@pytest.mark.parametrize("source", [FIRST, DROPS, MOVES])
def test_a_late_system_message_moves_to_the_user_turn_and_first_ones_are_joined(source: str):
    start = "[system] S\n\nT[user] x[assistant] a[user] " + LATE
    assert rendered(source, *CHAT) == start
    assert rendered(source, *CHAT, ("user", "y")) == start + "\n\ny"
    assert rendered(source, ("user", "x"), ("system", "L")) == "[user] x\n\n" + LATE
    assert rendered(source, *CHAT, ("system", ""), ("user", "y")) == start + "\n\ny"


def test_turns_that_a_template_supports_are_unchanged():
    text = "[system] S[system] T[user] x[assistant] a[system] L[user] y[user] z"
    assert rendered(ANY, *CHAT, ("user", "y"), ("user", "z")) == text
    assert rendered(FIRST, ("user", "y"), ("user", "z")) == "[user] y[user] z"
    assert rendered(ANY, ("system", "S")) == "[system] S"
    assert rendered(ANY, ("user", ""), ("assistant", "")) == "[user] [assistant] "


def test_a_template_is_probed_once(monkeypatch: pytest.MonkeyPatch):
    template, asked = ChatTemplate(FIRST), list[Any]()
    ask = ChatTemplate._ask
    monkeypatch.setattr(
        ChatTemplate, "_ask", lambda self, names: asked.append(1) or ask(self, names)
    )
    for count in (3, 1, 1):
        asked.clear()
        template.render(chat_of(*CHAT))
        assert len(asked) == count


def test_consecutive_turns_of_one_role_are_joined_if_roles_must_alternate():
    turns = [("user", "x"), ("user", "y"), ("assistant", "a"), ("assistant", "b"), ("user", "z")]
    assert rendered(GEMMA, *turns) == "[user] x\n\ny[assistant] a\n\nb[user] z"
    assert rendered(GEMMA, *CHAT) == f"[user] S\n\nT\n\nx[assistant] a[user] {LATE}"
    assert rendered(GEMMA, ("assistant", "a"), ("user", "x")) == "[user] [assistant] a[user] x"
    assert rendered(GEMMA, ("system", "S"), ("assistant", "a")) == "[user] S\n\n[assistant] a"
    assert rendered(GEMMA, ("system", "S")) == "[user] S"


def test_an_assistant_turn_is_inserted_between_a_tool_result_and_the_user():
    turns = [("user", "x"), CALL, ("tool", "r"), ("user", "y")]
    assert rendered(MISTRAL, *turns) == "[user] x[assistant] [tool] r[assistant]  [user] y"
    assert (
        rendered(MISTRAL, *turns[:3], ("assistant", "a"))
        == "[user] x[assistant] [tool] r[assistant] a"
    )
    assert (
        rendered(MISTRAL, *turns[:2], ("user", "y")) == "[user] x[assistant] [assistant]  [user] y"
    )
