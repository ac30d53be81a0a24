"""Settings of a server: one frozen object, made where the server is started."""

import ipaddress
import re
from dataclasses import dataclass, field

from paceline.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
"""A host name."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
"""An origin, as browsers serialize it: RFC 6454, section 6.2."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the HTTP server. The defaults are for one person on one machine.

    Numbers are in the ranges of the command line's options. Raises InvalidRequest if a host or an
    origin is not valid.
    """

    host: str = "127.0.0.1"
    """The address to listen at; one that other machines can reach requires an API key."""
    port: int = 0
    """0 takes a free one."""
    name: str | None = None
    """The API's name of the model; None: as it was loaded, of a path the last part."""
    aliases: tuple[str, ...] = ()
    """Further names of the model."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """A request must have one of these; empty: none is required."""
    hosts: tuple[str, ...] | None = None
    """Allowed values of the Host header, without a port; * is any. None: any, or this machine's
    own names if only this machine can reach the server."""
    behind_router: bool = False
    """Whether only a router has the key, and names the client of each request."""
    anyone: bool = False
    """Whether other machines may reach a server without keys."""
    origins: tuple[str, ...] = ()
    """Allowed origins (scheme://host:port) of web pages; * is any."""
    drafter: str = "auto"
    """Drafter of a request that names none."""
    policy: str = "auto"
    max_block: int | None = None
    think: bool | None = None
    """Whether a model thinks in a chat that does not say; None: as its chat template has it."""
    parse_special: bool = False
    """Whether names of control tokens in messages become the tokens."""
    max_waiting: int = 256
    """Requests in the queue."""
    max_running: int = 64
    """Requests that run at once."""
    max_connections: int | None = None
    """Connections at a time, as far as the limit on open files allows; None: 1024 beyond the
    requests that may run and wait."""
    prompt_cache_bytes: int | None = None
    """Limit of the KV of prompts on disk, of all models; None: none is kept there."""
    body_bytes: int = 8 * 2**20
    """Size limit of a body."""
    header_seconds: float = 10.0
    """Time limit for a client to send the headers of a request."""
    body_seconds: float = 30.0
    """Time limit for a client to send a body."""
    reading_seconds: float = 300.0
    """How long a client may read nothing of what is ready for it."""
    request_seconds: float | None = None
    """Time limit of an answer, the queue included; None: no limit."""
    keepalive_seconds: float = 15.0
    """Idle time after which a stream gets a comment, so that proxies keep it open."""
    grace_seconds: float = 30.0
    """How long running answers may continue after the server was asked to stop."""

    def __post_init__(self) -> None:
        for host in self.hosts or ():
            if not _is_host(host):
                raise InvalidRequest(
                    f"the allowed host {host!r} is none: expected a name or an address as in a "
                    "URL, without scheme, brackets and port, or *"
                )
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidRequest(
                    f"the origin {origin!r} is none: expected what a browser sends, "
                    "scheme://host or scheme://host:port in lower case and without a path, or *"
                )


def _is_host(text: str) -> bool:
    """Whether a Host header without its port can be this."""
    if text == "*" or _NAME.fullmatch(text):
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
