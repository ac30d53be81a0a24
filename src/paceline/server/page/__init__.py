"""GET /: a web page that chats with the model and shows speculative decoding.

The page is a client of the API like any other. Invariant: it loads nothing from other origins, runs
no script but its own, and stores nothing.
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
"""Path -> file and content type."""

_POLICY = {
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
    "content-security-policy": "; ".join(
        f"{directive} {source}" for directive, source in _POLICY.items()
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes() -> list[BaseRoute]:
    """The routes of the page."""
    return [_route(path, *file) for path, file in _FILES.items()]


def _route(path: str, name: str, kind: str) -> Route:
    content = files(__name__).joinpath(name).read_bytes()

    async def file(_request: Request) -> Response:
        return Response(content, headers={**_HEADERS, "content-type": kind})

    return Route(path, file, methods=["GET"])
