"""Orders of roles that a chat template rejects, moves or drops, as an order that it renders.

What a template can do is left to it. Each rule has a chat that is tried once per template: a
template that renders all of its turns in their order does not need the rule.

    chat       system  system  user  assistant  system  user
    Qwen3.5    system          user  assistant  user (the late system's text, marked, and its own)
    Gemma 2                    user  assistant  user (and the first one has that of both systems)

Independent of Jinja. Invariants: no text is lost, and texts keep their order; a turn does not
depend on later ones, except those that are joined to it, so that a growing chat keeps its prefix.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]

_MARKED = "<instructions>\n{}\n</instructions>"
"""A system turn's text in a user's turn: in no known vocabulary are these marks control tokens."""

_ROLES = {"s": "system", "u": "user", "a": "assistant", "-": "assistant"}


class Rule(NamedTuple):
    """What is done for a template that does not render a chat."""

    trial: str
    """The turns of that chat, a letter each: s(ystem), u(ser), a(ssistant), - (an empty answer)."""
    fit: Callable[[Sequence[Message]], list[Message]]

    @property
    def messages(self) -> list[Message]:
        return [
            {"role": _ROLES[turn], "content": "" if turn == "-" else f"turn-{place}."}
            for place, turn in enumerate(self.trial)
        ]

    def is_rendered(self, text: str) -> bool:
        """Whether a text has the contents of all turns, in their order."""
        end = 0
        for message in self.messages:
            start = text.find(message["content"], end)
            if start < 0:
                return False
            end = start + len(message["content"])
        return True


def _later_systems_in_user(messages: Sequence[Message]) -> list[Message]:
    """The first system turns joined; later ones marked in the user's turn that is there."""
    fitted: list[Message] = []
    marked = False  # the last turn is a user's that has or is a system's
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
    """The first system turn before the text of the first user's, as peers have it for Gemma 2."""
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
    """An empty user's turn after the system's, if no turn is a user's."""
    if any(message["role"] == "user" for message in messages):
        return [*messages]
    first = int(messages[0]["role"] == "system")
    return [*messages[:first], _EMPTY["user"], *messages[first:]]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Turns of user and assistant by turns, the user's first.

    Turns of one role in a row are joined. Templates do not count calls and their results: between
    turns of one role that have them between is an empty one of the other role.
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
    """A space in answers that are empty."""
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
"""In the order in which they are applied."""

_OTHER = {"user": "assistant", "assistant": "user"}
_EMPTY = {role: {"role": role, "content": ""} for role in _OTHER}


def _calls(message: Message) -> bool:
    return bool(message.get("tool_calls"))


def _joined(*messages: Message) -> dict[str, Any]:
    """Turns as one: their texts, and the other fields of the last one that has them."""
    fields = {name: value for message in messages for name, value in message.items()}
    texts = [message["content"] for message in messages]
    return {**fields, "role": messages[0]["role"], "content": "\n\n".join(filter(None, texts))}
