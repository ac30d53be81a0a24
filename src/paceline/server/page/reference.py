"""GET /docs: the OpenAPI document as a page, without scripts.

Independent of what the document describes. Invariant: every text of the document is escaped.
"""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>{title} · API</title>
  <link rel="icon" href="page.svg" type="image/svg+xml">
  <link rel="stylesheet" href="theme.css">
  <link rel="stylesheet" href="reference.css">
</head>
<body>
<main>
<h1>{title} {version}: the API</h1>
<p>As a document for programs: <a href="openapi.json">openapi.json</a>. To chat: <a href="./">the \
page</a>.</p>
<nav aria-label="Paths"><ul>{paths}</ul></nav>
{operations}
<h2 id="objects">Objects</h2>
{objects}
</main>
</body>
</html>
"""

_LIMITS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "minLength": "at least {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}
"""Keyword of a schema -> how its value is told."""


def reference(document: Mapping[str, Any]) -> bytes:
    """The HTML page of an OpenAPI 3.1 document."""
    operations = [
        (method.upper(), path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method != "parameters"
    ]
    schemas = document["components"]["schemas"]
    page = _PAGE.format(
        title=escape(document["info"]["title"]),
        version=escape(document["info"]["version"]),
        paths="".join(
            f'<li><a href="#{_anchor(method, path)}">{method} {escape(path)}</a></li>'
            for method, path, _ in operations
        ),
        operations="".join(_operation(*operation, schemas) for operation in operations),
        objects="".join(
            f'<section><h3 id="{escape(name)}">{_short(name)}</h3>{_fields(schema)}</section>\n'
            for name, schema in schemas.items()
        ),
    )
    return page.encode()


def _anchor(method: str, path: str) -> str:
    return f"{method}{escape(path).translate({ord(sign): '-' for sign in '/{}_'})}"


def _short(name: str) -> str:
    """The name of a schema without the module that tells it from others."""
    return escape(name.rpartition("__")[2])


def _operation(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> str:
    summary = operation["summary"]
    about = "" if path in summary else f"<p>{escape(summary)}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if schema := body.get("schema"):
        name = schema["$ref"].rpartition("/")[2]
        about += _fields(schemas[name])
    kinds = ", ".join(operation["responses"]["200"]["content"])
    return (
        f'<section><h2 id="{_anchor(method, path)}"><span>{method}</span> {escape(path)}</h2>'
        f"{about}<p>Replies with {escape(kinds)}.</p></section>\n"
    )


def _fields(schema: Mapping[str, Any]) -> str:
    """The fields of an object as a table."""
    about = schema.get("description", "").partition("\n")[0]
    text = f"<p>{escape(about)}</p>" if about and "/v1/" not in about else ""
    if "properties" not in schema:
        return f"{text}<p>{_type(schema)}</p>"
    needed = schema.get("required", ())
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{_type(field)}</td>'
        f"<td>{_default(field, needed=name in needed)}</td></tr>"
        for name, field in schema["properties"].items()
    )
    head = (
        '<tr><th scope="col">Field</th><th scope="col">Type</th><th scope="col">Default</th></tr>'
    )
    return (
        f'{text}<div class="table" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _default(field: Mapping[str, Any], *, needed: bool) -> str:
    if needed:
        return "required"
    value = field.get("default")
    if value is None or isinstance(value, dict | list):
        return ""
    return f"<code>{escape(json.dumps(value))}</code>"


def _type(schema: Any) -> str:
    """A schema in a few words."""
    if not isinstance(schema, Mapping) or not schema:
        return "any"
    return ", ".join([_kind(schema), *_limits(schema)])


def _kind(schema: Mapping[str, Any]) -> str:
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f'<a href="#{escape(name)}">{_short(name)}</a>'
    if values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in values)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        kinds = dict.fromkeys(map(_type, choices))
        return " or ".join(kind for kind in kinds if kind != "null")
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        kind = " or ".join(name for name in kind if name != "null")
    if kind == "array":
        return f"list of {_type(schema.get('items'))}"
    return escape(str(kind))


def _limits(schema: Mapping[str, Any]) -> Iterator[str]:
    for keyword, text in _LIMITS.items():
        if keyword in schema:
            yield text.format(schema[keyword])
