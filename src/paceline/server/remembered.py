"""Makes messages and items that clients keep from other models readable for a text model.

JSON in, JSON out, for all APIs. Calls and results of tools that another server ran become function
calls and results. An image, a file or an unknown part becomes a marker in its place. Invariant:
only parts of the user's own message, which the request answers, are rejected.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.runtime.prompt import TEXTS
from paceline.server.errors import ApiError, field_error

_ITEMS = ("", "message", "function_call", "reasoning", "item_reference")
"""Types of items that remain unchanged."""

_ARGUMENTS = (
    *("arguments", "input", "action", "actions", "operation", "code", "queries"),
    "revised_prompt",
)
"""Fields with the arguments of an item's call; the first present field counts."""

_RESULTS = ("output", "outputs", "result", "results", "tools", "error", "status")
"""Fields with the result of an item's call; the first present field counts."""

_MEDIA = re.compile(r"image|audio|video|document|screenshot|upload|^(input_)?file$|^search_result$")
"""Matches types of parts without text, and of those that contain text parts."""


class Reader:
    """Makes the messages or items of one body readable."""

    def __init__(self, *, blocks: bool = False) -> None:
        """Prepare for parts of OpenAI's APIs, or for Anthropic's content `blocks`."""
        self._blocks = blocks
        self._known = {*TEXTS, "thinking"} if blocks else {*TEXTS}
        self.ignored: list[str] = []
        """Paths and types of the parts and items that became markers."""
        self.tools: list[Any] = []
        """Tools that items offer."""
        self._called = set[str]()  # ids of the calls so far

    def turns(self, turns: list[Any], field: str) -> list[Any]:
        """Return readable messages and items. Raises ApiError for a part of the user's own."""
        own = _own_place(turns)
        read = [
            self.turn(turn, f"{field}[{place}]", own=place == own)
            for place, turn in enumerate(turns)
        ]
        markers = {entry.partition(": ")[0] for entry in self.ignored}
        while len(read) > 1 and f"{field}[{len(read) - 1}]" in markers:
            read.pop()  # not for the answer to continue
        return read

    def turn(self, turn: Any, where: str, *, own: bool = False) -> Any:
        """Return a readable message or item; parts of the user's `own` message may be rejected."""
        if isinstance(turn, dict) and ("role" not in turn or _kind(turn) == "additional_tools"):
            return self._item(turn, where)
        if not isinstance(turn, dict) or not isinstance(content := turn.get("content"), list):
            return turn
        where += ".content"
        if turn["role"] == "tool":
            return {**turn, "content": self._text(content, where)}
        parts = [self._part(part, f"{where}[{n}]", own=own) for n, part in enumerate(content)]
        return {**turn, "content": parts}

    def _item(self, item: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """Return an item as a function call or result, or as a marker."""
        kind, call_id = _kind(item), str(item.get("call_id") or item.get("id") or where)
        name, result = _first(_ARGUMENTS, item), _first(_RESULTS, item)
        tools = item.get("tools") if kind in ("additional_tools", "tool_search_output") else None
        self.tools += tools if isinstance(tools, list) else []
        if kind == "compaction_trigger":
            raise field_error(where, "compaction is not supported; ask for a summary")
        if is_call := bool(name) and kind.endswith(("_call", "program")):
            self._called.add(call_id)
        if kind in _ITEMS or kind == "additional_tools":
            return item if kind in _ITEMS else {"type": "reasoning"}  # without text: nothing
        ours = kind in ("function_call_output", "custom_tool_call_output")  # also of stored calls
        if ours or (kind.endswith("_output") and call_id in self._called):
            place = f"{where}.{result or 'output'}"
            output = self._text(item[result], place) if result else self._omitted(kind, place)
            return {"type": "function_call_output", "call_id": call_id, "output": output}
        if not is_call:
            return {"role": "assistant", "content": self._omitted(kind, where)}
        arguments = item[name]
        if not (name == "arguments" and isinstance(arguments, str)):
            arguments = _json(arguments if isinstance(arguments, dict) else {name: arguments})
        call: dict[str, Any] = {
            "type": "function_call",
            "call_id": call_id,
            "name": item.get("name") or kind.removesuffix("_call"),
            "namespace": item.get("namespace") or item.get("server_label"),
            "arguments": arguments,
        }
        if not item.get("call_id"):  # a server ran it; the item may have its result
            if result in ("", "status") or _MEDIA.search(kind):
                call["output"] = self._omitted(f"result of {kind}", f"{where}.output")
            else:
                call["output"] = self._text(item[result], f"{where}.{result}")
        return call

    def _part(self, part: Any, where: str, *, own: bool) -> Any:
        kind = _kind(part)
        if kind in self._known or not kind:
            return part
        if self._blocks and kind == "redacted_thinking":
            return {"type": "thinking"}  # encrypted by another server
        if self._blocks and kind.endswith("tool_use"):
            return {**part, "type": "tool_use"}
        if self._blocks and kind.endswith("tool_result"):
            content = self._text(part.get("content") or "", f"{where}.content")
            return {**part, "type": "tool_result", "content": content}
        return {"type": "text", "text": self._text_inside(part, where, own=own)}

    def _text_inside(self, part: Mapping[str, Any], where: str, *, own: bool) -> str:
        """Return the text in a document or search result; for other parts return a marker."""
        source, content = part.get("source"), part.get("content")
        inside = f"{where}.content"
        if isinstance(source, dict):
            inside = f"{where}.source.content"
            content = source.get("data" if source.get("type") == "text" else "content")
        if isinstance(content, str | list):
            about = [line for line in (part.get("title"), source) if isinstance(line, str)]
            return "\n".join([*about, self._text(content, inside, own=own)])
        if own:
            # In the format of Anthropic's paths: Claude Code then resends the message without it.
            raise ApiError(f"{where}.{_kind(part)[:80]}: this model reads text", param=where)
        return self._omitted(_kind(part), where)

    def _text(self, value: Any, where: str, *, own: bool = False) -> str:
        """Return the text of a result, or of a part's content."""
        value = self._plain(value, where, own=own)
        parts = value if isinstance(value, list) else [value]
        return "\n".join(part if isinstance(part, str) else _json(part) for part in parts)

    def _plain(self, value: Any, where: str, *, own: bool) -> Any:
        """Return a JSON value whose parts are texts."""
        if isinstance(value, list):
            return [self._plain(part, f"{where}[{n}]", own=own) for n, part in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if isinstance(text := value.get(TEXTS.get(_kind(value), "")), str):
            return text
        if _MEDIA.search(_kind(value)):
            return self._text_inside(value, where, own=own)
        return {
            name: self._plain(inner, f"{where}.{name}", own=own)
            for name, inner in value.items()
            if not name.startswith("encrypted_")
        }

    def _omitted(self, kind: str, where: str) -> str:
        """Return the marker for an omitted part or item."""
        kind = kind.removeprefix("input_").removesuffix("_url")[:80]
        self.ignored.append(f"{where}: {kind}")
        return f"[{kind} omitted: this model reads text]"


def _own_place(turns: list[Any]) -> int:
    """Return the index of the user's message to answer, or -1 if it is a tool's result."""
    for place in reversed(range(len(turns))):
        turn = turns[place] if isinstance(turns[place], dict) else {}
        content = turn.get("content")
        kinds = {_kind(part) for part in content} if isinstance(content, list) else set[str]()
        if turn.get("role") == "tool" or "tool_result" in kinds or _kind(turn).endswith("_output"):
            break  # agents send a tool's files next to its result
        if turn.get("role") == "user":
            return place
    return -1


def _first(names: Iterable[str], item: Mapping[str, Any]) -> str:
    return next((name for name in names if item.get(name) is not None), "")


def _kind(part: Any) -> str:
    return str(part.get("type") or "") if isinstance(part, dict) else ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
