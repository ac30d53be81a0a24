"""An OpenAI-compatible server and the ways in which it decodes: requests of each.

Plain decoding and speculation are compared if fields of a request can select them. The fields of a
paceline server are built in; those of another server are options. Otherwise a server decodes as it
was started: it may draft, and prompts may be prefix cache hits.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from paceline.bench.client import Endpoint, key_for, key_headers, model_of
from paceline.errors import InvalidRequest

PLAIN, SPECULATION, AS_SERVED = "plain", "speculation", "as served"

_PACELINE = {
    PLAIN: {"cache_prompt": False, "speculation": {"drafter": "none"}},
    SPECULATION: {"cache_prompt": False},
}


@dataclass(frozen=True, slots=True)
class Access:
    """Options of requests to servers."""

    model: str | None = None
    """None: the first model of a server."""
    key: str | None = None
    plain: str | None = None
    """JSON: further fields of a request for plain decoding."""
    speculation: str | None = None
    """JSON: further fields of a request for speculation."""
    plain_url: str | None = None
    """Base URL of a second server, which was started without speculation and decodes plainly."""

    def check(self) -> None:
        """Raise InvalidRequest unless both fields are JSON objects, or both are missing.

        With a second server, one may be missing.
        """
        for name, text in (("--plain", self.plain), ("--speculation", self.speculation)):
            if text is not None and not isinstance(_parsed(text), dict):
                raise InvalidRequest(f"{name} is {text!r}; expected a JSON object")
        if self.plain_url is None and (self.plain is None) != (self.speculation is None):
            raise InvalidRequest(
                "--plain and --speculation go together: a server's plain answers are compared with "
                "its speculative ones; use {} for no further fields"
            )


class Server:
    """A server, its models and keys, and the fields of requests in each of its modes."""

    def __init__(self, url: str, access: Access) -> None:
        """Connect to the server at a base URL.

        Raises:
            InvalidRequest: there is no OpenAI-compatible server at the URL.
            MissingExtra: httpx is not installed.
        """
        url = url.rstrip("/")
        plain_url = (access.plain_url or url).rstrip("/")
        self._urls = {AS_SERVED: url, SPECULATION: url, PLAIN: plain_url}
        self._keys = {mode: key_for(address, access.key) for mode, address in self._urls.items()}
        model = access.model or model_of(url, self._keys[AS_SERVED])
        self._models = dict.fromkeys(self._urls, model)
        if access.plain_url is not None:
            self._models[PLAIN] = access.model or model_of(plain_url, self._keys[PLAIN])
        self.name = _shown(url)
        fields: Mapping[str, Any] = {AS_SERVED: {}}
        texts = {PLAIN: access.plain, SPECULATION: access.speculation}
        if access.plain_url is not None or access.plain is not None:
            fields = {mode: _parsed(text or "{}") for mode, text in texts.items()}
        elif _is_paceline(url, self._keys[AS_SERVED]):
            fields = _PACELINE
        self.modes = tuple(fields)
        self._fields = {mode: json.dumps(extra) for mode, extra in fields.items()}
        self.settings: Mapping[str, Any] = {"model": model, "fields": fields}
        if access.plain_url is not None:
            self.settings = {**self.settings, "plain_server": _shown(plain_url)}

    def endpoint(self, mode: str, max_tokens: int) -> Endpoint:
        """URL, model and fields of requests in one of `modes`."""
        return Endpoint(
            self._urls[mode], self._models[mode], max_tokens, self._keys[mode], self._fields[mode]
        )


def _shown(url: str) -> str:
    """Host and path of a URL, without a user and password."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] + parts.path


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_paceline(url: str, key: str | None) -> bool:
    """True if the server's models are owned by `paceline`."""
    import httpx

    try:
        reply = httpx.get(f"{url}/models", headers=key_headers(key), timeout=30.0)
        models = reply.json()["data"]
        return any(model["owned_by"] == "paceline" for model in models)
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return False
