"""Renders chat templates: the handler of `ChatTemplate`'s process.

A template comes with a downloaded model. Jinja's sandbox limits its access, but not its time and
memory. So it runs in `system/guarded.py`. Request and response:

    {"source", "characters", "names": {...} or null}  (null: compile only)
    {"text": "..."}, {"variables": [...]} (compile only) or {"error": kind, "message": "..."}

Kinds: `invalid` (not a template), `refused` (by `raise_exception`), `missing` (in the messages),
`failed` (the template), `unfit` (messages it cannot render), `large` (exceeds a limit).
"""

import datetime
import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 2**30
"""Bytes of address space: 50 MiB for the interpreter, the rest for request and text."""

STACK = 2**24

_MAX_MESSAGE = 500


class _RefusedError(Exception):
    """Raised by `raise_exception` in a template."""


_KINDS: dict[type[Exception], str] = {
    _RefusedError: "refused",
    UndefinedError: "missing",
    **dict.fromkeys((TemplateError, ArithmeticError, RecursionError), "failed"),
    **dict.fromkeys((TypeError, ValueError, LookupError, AttributeError), "unfit"),
}
"""Exception -> kind; the first match counts."""


class _Generation(Extension):
    """{% generation %} marks answers in training data; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that lets lists grow and shrink: Kimi K2's template keeps a queue of ids.

    The lists of a request are this process's own copies, and are rendered once.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        grows = isinstance(obj, list) and attr in ("append", "pop")
        return grows or super().is_safe_attribute(obj, attr, value)


def start() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that handles requests. See `system/guarded.py`."""
    return _rendered


def _rendered(request: dict[str, Any]) -> dict[str, Any]:
    try:
        template = _compiled(request["source"])
    except (TemplateSyntaxError, RecursionError) as error:
        return _error("invalid", error)
    if request["names"] is None:
        parsed = _environment().parse(request["source"])
        return {"variables": sorted(find_undeclared_variables(parsed))}
    limit: int = request["characters"]
    parts, size = [], 0
    try:
        for part in template.generate(request["names"]):
            parts.append(part)
            size += len(part)
            if size > limit:
                return {"error": "large", "message": f"it wrote more than {limit} characters"}
    except tuple(_KINDS) as error:
        return _error(next(kind for of, kind in _KINDS.items() if isinstance(error, of)), error)
    return {"text": "".join(parts)}


def _error(kind: str, error: Exception) -> dict[str, str]:
    message = " ".join(str(error)[: 4 * _MAX_MESSAGE].split())[:_MAX_MESSAGE]
    return {"error": kind, "message": message or type(error).__name__}


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes for HTML and for ASCII; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, default=_to_list, **options)


def _to_list(value: Any) -> list[Any]:
    """Convert the result of a filter such as `map` for JSON."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _refuse(message: object) -> None:
    raise _RefusedError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)
