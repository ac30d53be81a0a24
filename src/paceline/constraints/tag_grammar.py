"""The grammar of arguments between tags, in llguidance's Lark.

Invariant: `tools/tags.py` reads every text that these grammars allow.
"""

import json
import re
from typing import Any

from paceline.constraints.value_grammar import EMPTY, ValueGrammar, escaped_text, length_bounds
from paceline.tools.parameters import Schema, constants, mapping, resolved
from paceline.tools.tags import CDATA, written_tag_value

_TOKEN = re.compile(r"<\[[0-9]+\]>")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


class TagGrammar(ValueGrammar):
    def _is_writable(self, key: str) -> bool:
        return key != "" and self._form.tags.name.fullmatch(key) is not None

    def _arguments(self) -> str:
        self._close = self._written(self._form.tags.close + self._form.tags.after)
        return self._ordered(self._root, self._tagged, self._free_tagged(), EMPTY)

    def _tagged(self, key: str, schema: Any) -> str:
        schema = mapping(schema)
        reference = schema.get("$ref")
        known = isinstance(reference, str)
        target = mapping(resolved(self._root, str(reference))) if known else schema
        values = constants(target)
        if values:
            heads = (self._head(key, is_text=isinstance(value, str)) for value in values)
            texts = (
                f"{head} {self._written(written_tag_value(self._form, value))}"
                for head, value in zip(heads, values, strict=True)
            )
            return f"({' | '.join(texts)}) {self._close}"
        kinds = target.get("type")
        if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
            bounds = target if kinds == "string" else {}
            return self._tagged_text(self._head(key, is_text=True), bounds)
        return f"{self._head(key, is_text=False)} {self._value(schema)} {self._close}"

    def _free_tagged(self) -> str:
        """Any argument, as a text; only needed if no properties are named."""
        if self._root.get("properties"):
            return ""
        names = f"/[^{escaped_text(self._form.tags.middle[0])}\\n]+/"
        middle = self._written(self._form.tags.head(is_text=True))
        return self._tagged_text(f"{self._written(self._form.tags.open)} {names} {middle}", {})

    def _head(self, key: str, *, is_text: bool) -> str:
        return self._written(f"{self._form.tags.open}{key}{self._form.tags.head(is_text=is_text)}")

    def _tagged_text(self, head: str, schema: Schema) -> str:
        """Return the rules for the opening, a text, and its tag; the text excludes the tag."""
        bounds = length_bounds(schema)
        text = rf"(.|\n){bounds}"
        if not self._form.tags.cdata:
            return f"{head} {self._text_before(self._form.tags.close, text)}"
        marked = self._text_before(f"]]>{self._form.tags.close}", text)
        plain = f"/[^<&\\n]{bounds}/ {self._close}"
        return f"{head} ({plain} | {json.dumps(CDATA)} {marked})"

    def _text_before(self, close: str, text: str) -> str:
        """Return a rule for a match of the regular expression `text`, and the tag after it."""
        letters = escaped_text(close.strip())
        prefix, rest = cut_at_token(self._written(close + self._form.tags.after))
        if rest:  # a token, which no text has
            name = f"{self._name}T{len(self._rules)}".upper()
            self._rules.append(
                f"{name}: /{text}{escaped_text(prefix)}/ & ~/(.|\\n)*{letters}(.|\\n)*/"
            )
            return f"{name} {rest}"
        end = escaped_text((self._form.end or self._form.close).strip())
        follows = f"({escaped_text(self._form.tags.open)}|{end})"
        bad = rf"/(.|\n)*{letters}\s*{follows}(.|\n)*/"
        return self._rule(
            rf"/{text}{escaped_text(close + self._form.tags.after)}/ & ~{bad}", "[lazy]"
        )


def cut_at_token(lark: str) -> tuple[str, str]:
    """Split quoted texts and tokens into the letters before the first token, and the rest.

    A text goes as far as it can, so that it has to match the letters before a token as well.
    """
    token = _TOKEN.search(lark)
    if token is None:
        return "", ""
    letters = _QUOTED.findall(lark[: token.start()])
    return "".join(map(json.loads, letters)), lark[token.start() :]
