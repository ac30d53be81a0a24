"""Grammar and parser of tool calls in an answer's text. Independent of tokenizers and models.

The format is that of Hermes and Qwen models, each call between marks of its own:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

SmolLM2's format, a list of calls between one pair of marks, is parsed too. Invariant: an incomplete
call remains text, so no output is lost.
"""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_OPENS = re.compile(rf"{OPEN}\s*")
_CLOSES = re.compile(rf"\s*(?:{CLOSE}\s*)?")


class ToolCall(NamedTuple):
    """A call that a model requests."""

    name: str
    arguments: str
    """A JSON object, as text."""


class Parsed(NamedTuple):
    """A parsed answer."""

    content: str
    """Text outside of calls; the unchanged answer if there are no calls."""
    calls: tuple[ToolCall, ...]


def parse_tool_calls(text: str) -> Parsed:
    """Parse the calls in an answer, in either format.

    A call without its closing mark counts if its JSON is complete.

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
    """Grammar of answers with calls, in llguidance's Lark syntax.

    Args:
        parameters: a function's name -> the JSON schema of its arguments, as text.
        marks: `OPEN` and `CLOSE` in Lark: as text, or as the model's own token.
        tokens: Lark ranges of special tokens that free text may contain; may be empty.
        free: whether text around the calls, and an answer without calls, are allowed.
        parallel: whether several calls are allowed.
    """
    begin, end = marks
    names = [f"f{place}" for place in range(len(parameters))]
    lines = [r"TEXT: /(.|\n)*/", rf'body: "\n" ({" | ".join(names)}) "\n" {end}']
    for name, (function, schema) in zip(names, parameters.items(), strict=True):
        head = f'{{"name": {json.dumps(function, ensure_ascii=False)}, "arguments": '
        # Each schema is its own document, because its references start at its root.
        lines += [f'{name}: {literal(head)} {name}p "}}"', f"{name}p: %json {schema}"]
    if not free:
        start = r'call ("\n" call)*' if parallel else "call"
        return "\n".join([*lines, f"call: {begin} body", f"start: {start}"])
    # Lazy: text ends as soon as the mark is complete, even inside a token.
    heads = f"TEXT {begin} | head" if begin != literal(OPEN) else "head"
    lines += [f"head[lazy]: TEXT {literal(OPEN)}", f"call: ({heads}) body"]
    lines += [f"free: TEXT <[{tokens}]>" if tokens else 'free: ""']
    lines += ["start: (free | call)* TEXT" if parallel else "start: free* (call | TEXT)"]
    return "\n".join(lines)


def literal(text: str) -> str:
    """Quote a text for Lark."""
    return json.dumps(text, ensure_ascii=False)


def _call(value: object) -> ToolCall:
    match value:
        case {"name": str(name), **rest}:
            arguments = rest.get("arguments", {})
            if isinstance(arguments, str):  # JSON in a string, as some models write it
                arguments = _DECODER.decode(arguments)
            if name and isinstance(arguments, dict):
                return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    raise ValueError("not a call")


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
