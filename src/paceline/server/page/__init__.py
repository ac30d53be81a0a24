"""GET /: a web page that chats with the model and shows speculative decoding.

The page is a client of the API like any other; chats stay in the browser. Invariant: it loads
nothing from other origins and runs no script but its own and those in `vendor/`.
"""

import gzip
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
"""Ending of a file of the page -> content type."""

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # Text becomes elements by way of the sanitiser alone, whatever a mistake in the page would do.
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "; ".join(
        f"{directive} {source}" for directive, source in _POLICY.items()
    ),
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}


@cache
def routes() -> tuple[BaseRoute, ...]:
    """The routes of the page: a path for each of its files, and / for index.html."""
    return tuple(
        _route("/" if path == "/index.html" else path, file.read_bytes(), path.rpartition(".")[2])
        for path, file in _files(files(__name__))
    )


def _route(path: str, content: bytes, ending: str) -> Route:
    """A route of one file of a page; its ending decides its type."""
    headers = {
        **_HEADERS,
        "content-type": _TYPES[ending],
        "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
    }
    compressed = gzip.compress(content, mtime=0)

    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(compressed, headers={**headers, "content-encoding": "gzip"})
        return Response(content, headers=headers)

    return Route(path, file, methods=["GET"])


def _files(folder: Traversable, prefix: str = "/") -> Iterator[tuple[str, Traversable]]:
    """The files of the page with their paths."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = prefix + entry.name
        if entry.is_dir():
            yield from _files(entry, f"{path}/")
        elif path.rpartition(".")[2] in _TYPES:
            yield path, entry
