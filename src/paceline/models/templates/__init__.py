"""Renders chat messages to the prompt text that the model was trained on.

Invariant: a template comes with a downloaded model, so it runs in a sandbox, in a process with
limits of time and memory (`worker.py`); any failure becomes a PacelineError.
"""

import atexit
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest, ModelError
from paceline.models.templates.roles import RULES, Rule
from paceline.system.processes import TimeLimit, WorkerCrash, WorkerProcess

SECONDS = 5.0
"""CPU seconds for rendering. Ten thousand messages take 0.1 s."""

CHARACTERS = 16 * 2**20
"""Maximum characters of the rendered text."""

PROCESS = WorkerProcess(Path(__file__).with_name("worker.py"), "renders chat templates")

atexit.register(PROCESS.close)


def start_templates() -> None:
    """Start the process that renders chat templates, without waiting until it is ready."""
    PROCESS.start()


class ChatTemplate:
    """The chat template of one model.

    >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}])
    '[user] Hi'
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        model: str = "this model",
    ) -> None:
        """Compile `source`. Raises ModelError when it is None or not valid Jinja."""
        if source is None:
            raise ModelError(
                f"{model} has no chat template, which messages need; `paceline generate --raw` "
                "takes a plain prompt"
            )
        self._named = f"the chat template of {model}"
        self._source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._needed: dict[Rule, bool] = {}
        self.variables = frozenset(self._result_of(self._ask(None))["variables"])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """Return the prompt text for `messages`, each {"role": ..., "content": ...}.

        `add_generation_prompt` ends the prompt where the model's answer begins. `extra` are
        variables of some templates, such as enable_thinking. All values are JSON.

        Role orders that the template cannot render are changed (`roles.py`). If a template fails,
        it gets an empty list of tools, or the arguments of tool calls as JSON text.

        Raises InvalidRequest if the template rejects the messages or fails on them, and ModelError
        if the template is faulty, or exceeds a limit of time or size.
        """
        _check_messages(messages)
        names = {
            **extra,
            **self._tokens,
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        chat = [dict(message) for message in messages]
        answer = self._rendered(names, chat)
        if answer.get("error") in _OF_MESSAGES and len(chat) <= _SEARCHED:

            def fails(count: int) -> bool:
                return "error" in self._rendered(names, chat[:count])

            place = bisect_left(range(1, len(chat)), True, key=fails)
            answer["place"] = f"messages[{place}] (the {chat[place]['role']}'s): "
        return str(self._result_of(answer)["text"])

    def _rendered(
        self, names: Mapping[str, Any], chat: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Render a chat, in another role order if the template needs one."""
        answer = self._fitted(names, self._ordered(chat, self._needs))
        if answer.get("error") == "refused":  # in an order other than those tried
            other = self._fitted(names, self._ordered(chat, lambda _rule: True))
            answer = answer if "error" in other else other
        return answer

    def _ordered(
        self, messages: Sequence[Mapping[str, Any]], needed: Callable[[Rule], bool]
    ) -> Sequence[Mapping[str, Any]]:
        """Return messages in an order that the template renders, by the rules it needs."""
        contents = [message.get("content") for message in messages]
        if not all(isinstance(content, str) for content in contents):
            return messages
        roles = [message["role"] for message in messages]
        if all(contents) and roles == (["user", "assistant"] * len(roles))[: len(roles)]:
            return messages  # an order that every template renders
        for rule in RULES:
            if (fitted := rule.fit(messages)) != messages and needed(rule):
                messages = fitted
        return messages

    def _needs(self, rule: Rule) -> bool:
        """Return whether the template fails on the chat of a rule, which is tried once."""
        if rule not in self._needed:
            answer = self._fitted({**self._tokens, "add_generation_prompt": True}, rule.messages)
            self._needed[rule] = not rule.is_rendered(answer.get("text", ""))
        return self._needed[rule]

    def _fitted(
        self, names: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Render messages, and again with other variables if the template fails."""
        names = {"tools": None, **names, "messages": messages}
        answer = first = self._ask(names)
        for fit, kinds in _FITS.items():
            if answer.get("error") in kinds and (fitted := {**names, **fit(names)}) != names:
                names, answer = fitted, self._ask(fitted)
        return first if "error" in answer else answer

    def _ask(self, names: Mapping[str, Any] | None) -> dict[str, Any]:
        """Render; None: only compile. The result may be an error; see worker.py."""
        limits = {"seconds": SECONDS, "characters": CHARACTERS}
        try:
            request = json.dumps(
                {"source": self._source, **limits, "names": names}, ensure_ascii=False
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the messages cannot be written as JSON: {error}") from error
        try:
            return PROCESS.ask(request.encode("utf-8", "surrogatepass"), SECONDS)
        except TimeLimit:
            raise ModelError(f"{self._named} took longer than {SECONDS:g} s") from None
        except WorkerCrash:
            raise ModelError(f"{self._named} exceeds its limit: it took too much memory") from None

    def _result_of(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the result unless it is an error. Raises InvalidRequest or ModelError."""
        if "error" not in answer:
            return answer
        where, reason = answer.get("place", ""), answer["message"]
        template = where + self._named
        raise {
            "invalid": ModelError(
                f"{template} is invalid: {reason}; use `paceline generate --raw`"
            ),
            "refused": InvalidRequest(f"{template} rejects these messages: {reason}"),
            "missing": InvalidRequest(f"{template} needs a field that a message lacks: {reason}"),
            "unfit": InvalidRequest(f"{template} cannot render these messages: {reason}"),
            "failed": ModelError(f"{template} failed: {reason}"),
            "large": ModelError(f"{template} exceeds its limit: {reason}"),
        }[answer["error"]]


def _with_arguments(change: Callable[[Any], Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages with the arguments of their tool calls changed."""

    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    def fitted(message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        return {**message, "tool_calls": [*map(changed, calls)]} if calls else message

    try:
        return {"messages": [*map(fitted, names["messages"])]}
    except (KeyError, TypeError):
        return {}


_OF_MESSAGES = ("refused", "missing", "unfit", "failed")
"""Errors that other messages or variables may avoid."""

_SEARCHED = 1000
"""Maximum messages of a chat that is searched for the first failing one."""

_FITS: Mapping[Callable[[Mapping[str, Any]], dict[str, Any]], tuple[str, ...]] = {
    # Some templates iterate the tools without a check,
    lambda names: {"tools": names["tools"] or []}: ("unfit",),
    # or the arguments of a call, which then have to be an object,
    partial(
        _with_arguments, lambda value: value if isinstance(value, Mapping) else {}
    ): _OF_MESSAGES,
    # or join them to a text, as OpenAI's API has them.
    partial(_with_arguments, lambda value: json.dumps(value, ensure_ascii=False)): ("unfit",),
}
"""Changes of variables, each tried once -> the errors that they may avoid."""


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest(f"messages is {messages!r}; expected a list of at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(
                f"message {place} is {message!r}; expected an object with a role, such as "
                '{"role": "user", "content": "Hello"}'
            )
