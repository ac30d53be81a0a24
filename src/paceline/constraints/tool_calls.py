"""Calls of functions in an answer's text: the form they have, as a grammar and as a parser.

Knows text only: no tokenizer and no model. The form is the one that Hermes and Qwen models were
trained on, each call between marks of its own:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

SmolLM2's form, a list of calls in one pair of marks, is read as well. The rule: what is not a whole
call stays text, so that nothing a model says is lost.
"""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_OPENS = re.compile(rf"{OPEN}\s*")
_CLOSES = re.compile(rf"\s*(?:{CLOSE}\s*)?")


class ToolCall(NamedTuple):
    """A function that a model wants to be called."""

    name: str
    arguments: str
    """A JSON object, as text."""


class Parsed(NamedTuple):
    """An answer taken apart."""

    content: str
    """The text that is no call; without calls the whole answer as it is."""
    calls: tuple[ToolCall, ...]


def parse_tool_calls(text: str) -> Parsed:
    """The calls in an answer, in either form, in their order.

    A call whose closing mark is missing counts once its JSON is whole.

    >>> parse_tool_calls('<tool_call>[{"name": "now", "arguments": {}}]</tool_call>').calls
    (ToolCall(name='now', arguments='{}'),)
    """
    content: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    while found := _OPENS.search(text, at):
        try:
            value, end = _DECODER.raw_decode(text, found.end())
            here = [_call(each) for each in (value if isinstance(value, list) else [value])]
        except (ValueError, RecursionError):
            content.append(text[at : found.end()])
            at = found.end()
            continue
        content.append(text[at : found.start()])
        calls += here
        closed = _CLOSES.match(text, end)
        at = closed.end() if closed else end
    content.append(text[at:])
    return Parsed("".join(content).strip(), tuple(calls)) if calls else Parsed(text, ())


def calls_grammar(
    parameters: Mapping[str, str],
    *,
    marks: tuple[str, str],
    tokens: str,
    free: bool,
    parallel: bool,
) -> str:
    """Answers with calls, in llguidance's kind of Lark.

    Args:
        parameters: a function's name -> the JSON schema of its arguments, as text.
        marks: how a model says `OPEN` and `CLOSE`, each in Lark: as text or as a token of its own.
        tokens: other tokens that are not text and may stand in free text, as ranges in Lark; may
            be empty.
        free: whether there may be text around the calls, and no call at all.
        parallel: whether there may be several calls.
    """
    begin, end = marks
    names = [f"f{place}" for place in range(len(parameters))]
    lines = [r"TEXT: /(.|\n)*/", rf'body: "\n" ({" | ".join(names)}) "\n" {end}']
    for name, (function, schema) in zip(names, parameters.items(), strict=True):
        head = f'{{"name": {json.dumps(function, ensure_ascii=False)}, "arguments": '
        # Each schema is a document of its own, because its references begin at its root.
        lines += [f'{name}: {literal(head)} {name}p "}}"', f"{name}p: %json {schema}"]
    if not free:
        start = r'call ("\n" call)*' if parallel else "call"
        return "\n".join([*lines, f"call: {begin} body", f"start: {start}"])
    # Lazy: text ends as soon as the mark is whole, also inside a token.
    heads = f"TEXT {begin} | head" if begin != literal(OPEN) else "head"
    lines += [f"head[lazy]: TEXT {literal(OPEN)}", f"call: ({heads}) body"]
    lines += [f"free: TEXT <[{tokens}]>" if tokens else 'free: ""']
    lines += ["start: (free | call)* TEXT" if parallel else "start: free* (call | TEXT)"]
    return "\n".join(lines)


def literal(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def _call(value: object) -> ToolCall:
    match value:
        case {"name": str(name), **rest}:
            arguments = rest.get("arguments", {})
            if isinstance(arguments, str):  # JSON in a string, as some models write it
                arguments = _DECODER.decode(arguments)
            if name and isinstance(arguments, dict):
                return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    raise ValueError("no call")


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
