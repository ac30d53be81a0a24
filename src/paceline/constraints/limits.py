"""Limits of a grammar's text, which need no compiling.

An intersection (`&`) of expressions has as many states as theirs multiplied, and a repeat as many
as its largest number. `matcher_process.py` limits what remains.
"""

import re

from paceline.errors import InvalidRequest
from paceline.models import check_unicode

MAX_CHARACTERS = 64 * 1024
"""Limit of a schema, expression or grammar."""

MAX_INTERSECTIONS = 32

MAX_REPEATS = 10_000
"""Limit of nested repeats multiplied, in a grammar with intersections: of `(a{20}b){300}` 6,000."""

_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/((?:\\.|[^/\\])+)/')
"""A string, a comment or an expression of Lark."""

_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()]|\{(\d{1,9})(?:,(\d{0,9}))?\}|.", re.DOTALL)
"""An escape, a class, a parenthesis, a repeat or another character of an expression."""


def check_text(what: str, text: str) -> None:
    """Raise InvalidRequest for a text that is too long or not valid Unicode."""
    check_unicode(what, text)
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"{what} has {len(text)} characters; expected at most {MAX_CHARACTERS}"
        )


def check_lark(what: str, text: str) -> None:
    """Raise InvalidRequest for a grammar in Lark that is too long or too complex."""
    check_text(what, text)
    intersections = sum(map(_LITERAL.sub("", text).count, "&~"))
    if intersections > MAX_INTERSECTIONS:
        raise InvalidRequest(
            f"{what} has {intersections} intersections and complements (& and ~); expected at most "
            f"{MAX_INTERSECTIONS}"
        )
    expressions = [literal[1] for literal in _LITERAL.finditer(text) if literal[1]]
    repeats = max(map(_nested_repeats, expressions), default=1)
    if intersections and repeats > MAX_REPEATS:
        raise InvalidRequest(
            f"{what} has intersections (& or ~) and an expression that repeats {repeats} times; "
            f"expected at most {MAX_REPEATS}, nested repeats multiplied"
        )


def _nested_repeats(expression: str) -> int:
    """The largest product of an expression's nested repeats; 1 without any."""
    groups, atom = [1], 1
    for part in _PART.finditer(expression):
        if part[0] == "(":
            groups.append(1)
        elif part[0] == ")" and len(groups) > 1:
            atom = groups.pop()
        elif part[1]:
            atom *= max(int(part[2] or part[1]), 1)
        else:
            atom = 1
        groups[-1] = max(groups[-1], atom)
    return max(groups)
