"""The grammar of an answer with tool calls, in llguidance's Lark syntax, from a `ToolForm`.

Invariant: what a grammar allows, `tool_calls.py` reads back.
"""

import json
from collections.abc import Callable, Mapping

from paceline.constraints.tool_forms import ToolForm


def calls_grammar(
    form: ToolForm,
    parameters: Mapping[str, str],
    *,
    written: Callable[[str], str],
    tokens: str,
    free: bool,
    parallel: bool,
) -> str:
    """Grammar of answers with calls.

    Args:
        form: how calls are written.
        parameters: a function's name -> the JSON schema of its arguments, as text.
        written: text -> Lark, with the model's own tokens for marks in it.
        tokens: Lark ranges of special tokens that free text may contain; may be empty.
        free: whether text around the calls, and an answer without calls, are allowed.
        parallel: whether several calls are allowed.
    """
    names = [f"f{place}" for place in range(len(parameters))]
    mark = written(form.mark)
    begin, close = written(form.lead), written(form.close)
    lines = [r"TEXT: /(.|\n)*/", f"body: {begin} ({' | '.join(names)}) {close}"]
    for name, (function, schema) in zip(names, parameters.items(), strict=True):
        head = form.before + json.dumps(function, ensure_ascii=False)[1:-1] + form.after
        # Each schema is its own document, because its references start at its root.
        lines += [
            f"{name}: {written(head)} {name}p {written(form.end)}",
            f"{name}p: %json {schema}",
        ]
    if not free:
        more = f"({written(form.separator)} call)*"
        start = f"call {more}" if parallel else "call"
        return "\n".join([*lines, f"call: {mark} body", f"start: {start}"])
    # Lazy: text ends as soon as the mark is complete, even inside a token.
    heads = f"TEXT {mark} | head" if mark != literal(form.mark) else "head"
    lines += [f"head[lazy]: TEXT {literal(form.mark)}", f"call: ({heads}) body"]
    lines += [f"free: TEXT <[{tokens}]>" if tokens else 'free: ""']
    lines += ["start: (free | call)* TEXT" if parallel else "start: free* (call | TEXT)"]
    return "\n".join(lines)


def literal(text: str) -> str:
    """Quote a text for Lark."""
    return json.dumps(text, ensure_ascii=False)
