"""Any server that speaks OpenAI's API, asked for chat completions over the network.

Plain against speculation where a request can choose: by fields that a request may have. A paceline
server is known by what it says of its models, and its fields are known; for another one they are
given. What a server is not told it does as it was started, so that its answers may be drafted, and
its prompts found in a cache.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.tools.bench.peers.base import Answer, Peer, Question
from paceline.tools.bench.serve.load import Target, closed_loop, model_of
from paceline.tools.suite import SuitePrompt

PLAIN, SPECULATION, AS_SERVED = "plain", "speculation", "as served"

_PACELINE = {
    PLAIN: {"cache_prompt": False, "speculation": {"drafter": "none"}},
    SPECULATION: {"cache_prompt": False},
}


@dataclass(frozen=True, slots=True)
class Access:
    """How servers are asked."""

    model: str | None = None
    """None: the first that a server has."""
    key: str | None = None
    plain: str | None = None
    """JSON: more fields of a request that is to be decoded plainly."""
    speculation: str | None = None
    """The same for one that is to be speculated on."""

    def check(self) -> None:
        """Raises InvalidRequest for fields that are no JSON objects, or for one without other."""
        for name, given in (("--plain", self.plain), ("--speculation", self.speculation)):
            if given is not None and not isinstance(_parsed(given), dict):
                raise InvalidRequest(f"{name} is {given!r}; expected a JSON object")
        if (self.plain is None) != (self.speculation is None):
            raise InvalidRequest(
                "--plain and --speculation go together: a server's plain answers are compared with "
                "those that it speculates on; {} where nothing has to be said"
            )


def open_server(url: str, access: Access) -> Peer:
    """The server at a base URL.

    Raises:
        InvalidRequest: nobody answers there, or not as such a server does.
        MissingExtra: httpx is not installed.
    """
    try:
        import httpx  # noqa: F401  (`load` asks with it)
    except ImportError as error:
        raise MissingExtra(f"{url} is asked with httpx: pip install httpx") from error
    return Server(url.rstrip("/"), access)


class Server:
    """A server, by what its clients see: its times are ours, its tokens those that it counts."""

    packages: Sequence[str] = ()

    def __init__(self, url: str, access: Access) -> None:
        """Ask it for its models."""
        self._key = access.key
        self._url = url
        self._model = access.model or model_of(url, access.key)
        parts = urlsplit(url)
        self.name = parts.netloc.rpartition("@")[2] + parts.path
        fields: Mapping[str, Any] = {AS_SERVED: {}}
        if access.plain is not None and access.speculation is not None:
            fields = {PLAIN: _parsed(access.plain), SPECULATION: _parsed(access.speculation)}
        elif _is_paceline(url, access.key):
            fields = _PACELINE
        self.ways = tuple(fields)
        self._fields = {way: json.dumps(each) for way, each in fields.items()}
        self.settings: Mapping[str, Any] = {"model": self._model, "fields": fields}

    def answer(self, question: Question, max_tokens: int, way: str) -> Answer:
        """See `Peer`. Raises ModelError where it answers with an error, or counts no tokens."""
        asked = Target(self._url, self._model, max_tokens, self._key, self._fields[way])
        prompt = SuitePrompt(question.id, question.kind, question.messages)
        found = closed_loop(asked, [prompt], clients=1, requests=1).samples[0]
        if found.error is not None:
            raise ModelError(found.error.partition(": ")[2])
        if found.tokens < 1:
            raise ModelError("it does not say how many tokens an answer has (usage)")
        whole = found.ended - found.started
        first = whole if found.first is None else found.first
        return Answer(found.text, None, found.tokens, first, whole - first)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_paceline(url: str, key: str | None) -> bool:
    """Whether its models say that they are paceline's."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        models = httpx.get(f"{url}/models", headers=headers, timeout=30.0).json()["data"]
        return any(model["owned_by"] == "paceline" for model in models)
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return False  # whatever it is, it is another
