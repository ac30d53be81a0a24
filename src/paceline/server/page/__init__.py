"""GET /: a web page that chats with the model and shows speculative decoding.

The page is a client of the API like any other; chats stay in the browser. Invariant: it loads
nothing from other origins and runs no script but its own and those in `vendor/`.
"""

import gzip
import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
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
def routes() -> tuple[Route, ...]:
    """The routes of the page: a path for each of its files, and / for index.html."""
    folder = Path(__file__).parent
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _TYPES)
    return tuple(_route(path.relative_to(folder).as_posix(), path) for path in paths)


def _route(name: str, path: Path) -> Route:
    content = path.read_bytes()
    headers = {
        **_HEADERS,
        "content-type": _TYPES[path.suffix],
        "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
    }
    compressed = gzip.compress(content, mtime=0)

    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(compressed, headers={**headers, "content-encoding": "gzip"})
        return Response(content, headers=headers)

    return Route("/" if name == "index.html" else f"/{name}", file, methods=["GET"])
