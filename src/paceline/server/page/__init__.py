"""GET /: a web page that chats with the model and shows speculative decoding.

The page is an ordinary client of the API; chats stay in the browser. Invariant: it loads nothing
from other origins, and runs only its own scripts and those in `vendor/`.
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
"""File extension -> content type."""

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # Only the sanitizer turns text into elements, even if the page has a bug.
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
    """Return the routes of the page: a path for each of its files, and / for index.html."""
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
