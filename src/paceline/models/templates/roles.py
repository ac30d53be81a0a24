"""Converts role orders that a chat template rejects, moves or drops to one that it renders.

Orders that a template supports are left alone. Each rule has a chat that is tried once per
template: a template that renders all of its turns in their order does not need the rule.

    chat       system  system  user  assistant  system  user
    Qwen3.5    system          user  assistant  user (the late system's text, tagged, and its own)
    Gemma 2                    user  assistant  user (and the first one has that of both systems)

Independent of Jinja. Invariants: no text is lost, and texts keep their order; a turn does not
depend on later ones, except those that are joined to it, so that a growing chat keeps its prefix.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]

_MARKED = "<instructions>\n{}\n</instructions>"
"""A system turn's text in a user's turn: in no known vocabulary are these tags control tokens."""

_ROLES = {"s": "system", "u": "user", "a": "assistant", "-": "assistant"}


class Rule(NamedTuple):
    """A conversion for templates that cannot render a chat."""

    trial: str
    """That chat's turns, one letter each: s(ystem), u(ser), a(ssistant), - (an empty answer)."""
    fit: Callable[[Sequence[Message]], list[Message]]

    @property
    def messages(self) -> list[Message]:
        return [
            {"role": _ROLES[turn], "content": "" if turn == "-" else f"turn-{place}."}
            for place, turn in enumerate(self.trial)
        ]

    def is_rendered(self, text: str) -> bool:
        """Return whether a text has the contents of all turns, in order."""
        end = 0
        for message in self.messages:
            start = text.find(message["content"], end)
            if start < 0:
                return False
            end = start + len(message["content"])
        return True


def _later_systems_in_user(messages: Sequence[Message]) -> list[Message]:
    """Join the first system turns; put later ones, tagged, into the adjacent user's turn."""
    fitted: list[Message] = []
    marked = False  # True if the last turn is a user's with, or from, a system's
    for message in messages:
        last = fitted[-1]["role"] if fitted else "system"
        if message["role"] != "system":
            if marked and message["role"] == "user":
                fitted[-1] = _joined(fitted[-1], message)
            else:
                fitted.append(message)
            marked = False
        elif last == "system":
            fitted[-1:] = [_joined(*fitted[-1:], message)]
        elif message["content"]:
            user = {"role": "user", "content": _MARKED.format(message["content"])}
            marked = True
            if last == "user":
                fitted[-1] = _joined(fitted[-1], user)
            else:
                fitted.append(user)
    return fitted


def _first_system_in_user(messages: Sequence[Message]) -> list[Message]:
    """Put the first system turn before the first user's text, as other runtimes do for Gemma 2."""
    system, *rest = messages
    if system["role"] != "system":
        return [*messages]
    user = {**system, "role": "user"}
    if rest and rest[0]["role"] == "user":
        return [_joined(user, rest[0]), *rest[1:]]
    return [user, *rest]


def _only_system_as_user(messages: Sequence[Message]) -> list[Message]:
    if all(message["role"] == "system" for message in messages):
        return [{**_joined(*messages), "role": "user"}]
    return [*messages]


def _with_a_user(messages: Sequence[Message]) -> list[Message]:
    """Add an empty user's turn after the system's, if there is none."""
    if any(message["role"] == "user" for message in messages):
        return [*messages]
    first = int(messages[0]["role"] == "system")
    return [*messages[:first], _EMPTY["user"], *messages[first:]]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Alternate turns of user and assistant, the user's first.

    Consecutive turns of one role are joined. Templates do not count tool calls and results: if
    these separate two turns of one role, an empty turn of the other role is added.
    """
    fitted: list[Message] = []
    due = "user"
    for message in messages:
        role = message["role"]
        if role in _OTHER and not message.get("tool_calls"):
            if role != due and fitted and fitted[-1]["role"] == role and not _calls(fitted[-1]):
                fitted[-1] = _joined(fitted[-1], message)
                continue
            if role != due:
                fitted.append(_EMPTY[due])
            due = _OTHER[role]
        fitted.append(message)
    return fitted


def _with_answers(messages: Sequence[Message]) -> list[Message]:
    """Put a space into empty answers."""
    return [
        {**message, "content": " "}
        if message["role"] == "assistant" and not message["content"] and not _calls(message)
        else message
        for message in messages
    ]


RULES = (
    Rule("ssuasu", _later_systems_in_user),
    Rule("sua", _first_system_in_user),
    Rule("s", _only_system_as_user),
    Rule("auuaau", _alternating),
    Rule("a", _with_a_user),
    Rule("u-u", _with_answers),
)
"""The rules, in the order of application."""

_OTHER = {"user": "assistant", "assistant": "user"}
_EMPTY = {role: {"role": role, "content": ""} for role in _OTHER}


def _calls(message: Message) -> bool:
    return bool(message.get("tool_calls"))


def _joined(*messages: Message) -> dict[str, Any]:
    """Join turns: their texts, and for other fields the last turn that has them."""
    fields = {name: value for message in messages for name, value in message.items()}
    texts = [message["content"] for message in messages]
    return {**fields, "role": messages[0]["role"], "content": "\n\n".join(filter(None, texts))}
