"""The grammar of an answer with tool calls, in llguidance's Lark syntax, from a `ToolForm`.

Invariant: `tools/calls.py` reads back every text that a grammar allows.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.constraints.tag_grammar import TagGrammar, cut_at_token
from paceline.constraints.value_grammar import EMPTY, ValueGrammar, escaped_text
from paceline.decoding.reasoning import ReasoningMarks
from paceline.errors import InvalidRequest
from paceline.tools.forms import NAME, Syntax, ToolForm

_TEXT = r"/(.|\n)*/"
_SPACE = r"/\s{0,8}/"


class CallGrammar:
    """Makes the grammar of one request's answers."""

    def __init__(
        self,
        form: ToolForm,
        parameters: Mapping[str, Mapping[str, Any]],
        *,
        written: Callable[[str], str],
        token: Callable[[str], str],
    ) -> None:
        """Prepare for functions: name -> JSON schema of the arguments.

        `written` makes Lark of a text, `token` of a mark, with the model's own tokens. Raises
        InvalidRequest if a name cannot be written.
        """
        self._form = form
        self._parameters = parameters
        self._written = written
        self._token = token
        names = [f"f{place}" for place in range(len(parameters))]
        self._lines = [f"TEXT: {_TEXT}", f"any: {' | '.join(names)}"]
        for name, (function, schema) in zip(names, parameters.items(), strict=True):
            self._lines += self._function(name, function, schema)
        self._mark = written(form.mark)

    def forced(self, *, parallel: bool, thoughts: ReasoningMarks | None) -> str:
        """Grammar of answers that are calls, after `thoughts`, if there are any.

        A call may be followed by one token of text, which ends the answer. Without it a model that
        has called, and continues with a line of text, would have to call again.
        """
        form = self._form
        several = parallel and not form.single
        lines = [*self._lines, self._group(several=several)]
        # A bare call is written without its mark, as the templates do.
        lines += ["call: body" if form.bare else f"call: {self._mark} body"]
        more = ""
        if several and form.between is None:
            # Neither white space, nor what begins as a mark does.
            lines += [rf"tail[max_tokens=1]: /[^\s{re.escape(form.mark[0])}](.|\n)*/"]
            more = f" ({self._written(form.separator)} call)* ({_SPACE} tail?)?"
        before = ""
        if thoughts is not None:
            lines += self._thoughts(thoughts)
            before = "thoughts "
        return "\n".join([*lines, f"start: {before}call{more}"])

    def free(self, *, parallel: bool, tokens: str) -> str:
        """Grammar of answers with any text around calls, or without calls.

        `tokens` are Lark ranges of special tokens that free text may contain; may be empty.
        """
        form, mark = self._form, self._mark
        several = parallel and not form.single
        lines = [*self._lines, self._group(several=several)]
        lines += [f"free: TEXT <[{tokens}]>" if tokens else 'free: ""']
        if form.bare or form.channels:
            after = f"(<[{tokens}]> TEXT)*" if tokens else EMPTY
            rules = self._free_bare(after) if form.bare else self._free_channels(after)
            return "\n".join([*lines, *rules])
        prefix, rest = cut_at_token(mark)
        if not rest and mark != EMPTY:
            # Lazy: text ends as soon as the mark is complete, even inside a token.
            lines += [f"head[lazy]: TEXT {literal(form.mark)}", "call: head body"]
        else:  # the same letters are text
            lines += [f"HEAD: /(.|\\n)*{escaped_text(prefix)}/", f"call: HEAD {rest} body"]
        lines += ["start: (free | call)* TEXT" if several else "start: free* (call | TEXT)"]
        return "\n".join(lines)

    def _function(self, name: str, function: str, schema: Mapping[str, Any]) -> list[str]:
        form = self._form
        if form.as_object:
            function = json.dumps(function, ensure_ascii=False)[1:-1]
        elif not NAME.fullmatch(function):
            raise InvalidRequest(
                f"the function name {function!r} cannot be written in this model's tool-call "
                "format; expected letters, digits and _ . : / -"
            )
        head = self._written(form.before + function + form.after)
        if form.label is not None:
            mark, text = form.label
            head = self._written(form.before + function + mark)
            head = f"{head} /{text}/ {self._written(form.after)}"
        line = f"{name}: {head} {name}p {self._written(form.end)}"
        if form.syntax is not Syntax.JSON:
            kind = TagGrammar if form.syntax is Syntax.TAGS else ValueGrammar
            return [line, *kind(form, f"{name}p", schema, self._written).lines()]
        # Each schema is its own document, because its references start at its root.
        return [line, f"{name}p: %json {json.dumps(schema)}"]

    def _group(self, *, several: bool) -> str:
        form = self._form
        calls = "any"
        if several and form.between is not None:
            calls += f" ({self._written(form.between)} any)*"
        return f"body: {self._written(form.lead)} {calls} {self._written(form.close)}"

    def _free_bare(self, after: str) -> list[str]:
        """Return the rule for an answer that is a call, or text that does not begin like one."""
        form = self._form
        names = "|".join(
            escaped_text(json.dumps(name, ensure_ascii=False)[1:-1]) for name in self._parameters
        )
        begins = f"{escaped_text(form.before)}({names}){escaped_text(form.after)}"
        return [
            rf"OTHER: {_TEXT} & ~/\s*{begins}(.|\n)*/",
            f"start: {self._mark}? body | OTHER {after}",
        ]

    def _free_channels(self, after: str) -> list[str]:
        """Return the rule for messages that name their channels; some are calls."""
        begins = escaped_text(self._form.before)
        return [
            rf"OTHER: {_TEXT} & ~/{begins}(.|\n)*/",
            f"message: {self._mark} OTHER {after}",
            f"start: TEXT {after} message* ({self._mark} body)?",
        ]

    def _thoughts(self, marks: ReasoningMarks) -> list[str]:
        """Rules for thoughts, which may be left out unless the prompt has begun them."""
        written = self._token
        if marks.channels:
            start, channel, message = map(written, marks.opens)
            body = f'{channel} "analysis" {message} TEXT {written(marks.closes[0])}'
            return [f'thoughts: ({body} {start} "assistant")?']
        closes, lazy = [], []
        for place, mark in enumerate(marks.closes):
            if written(mark) == literal(mark):
                lazy.append(f"closed{place}[lazy]: TEXT {literal(mark)}")
                closes.append(f"closed{place}")
            else:
                closes.append(f"TEXT {written(mark)}")
        opens = " | ".join(map(written, marks.opens))
        thought = f"({' | '.join(closes)}) /\\s{{0,8}}/"
        body = thought if marks.inside else f"(({opens}) {thought})?"
        return [*lazy, f"thoughts: {body}"]


def literal(text: str) -> str:
    """Quote a text for Lark."""
    return json.dumps(text, ensure_ascii=False)
