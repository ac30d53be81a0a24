"""GET /: a page to chat with the model in a browser, and to watch it guess.

Knows five files beside this one and what a browser may do with them. Knows nothing of the model:
the page asks for all of it like any other client. The rule: the page loads nothing from anywhere
else, runs no script but its own, and keeps nothing.
"""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/client.js": ("client.js", "text/javascript; charset=utf-8"),
    "/page.svg": ("page.svg", "image/svg+xml"),
}
"""Path -> its file and type."""

_ALLOWED = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "; ".join(f"{what} {who}" for what, who in _ALLOWED.items()),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes() -> list[BaseRoute]:
    """The page's paths."""
    return [_route(path, *about) for path, about in _FILES.items()]


def _route(path: str, name: str, kind: str) -> Route:
    content = files(__name__).joinpath(name).read_bytes()

    async def file(_request: Request) -> Response:
        return Response(content, headers={**_HEADERS, "content-type": kind})

    return Route(path, file, methods=["GET"])
