"""Server settings: one frozen object, made where the server is started; and the API keys.

Invariant: an empty key is an error, whatever its source. An unset shell variable must not start a
server without keys.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import InvalidRequest
from paceline.storage.text import unmarked

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
"""A host name."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
"""An origin, as browsers serialize it: RFC 6454, section 6.2."""

_ROOT_PATH = re.compile(r"(/[\w.~-]+)*")

KEY_VARIABLE = "PACELINE_API_KEY"  # environment variable
_MAX_BYTES = 2**20  # of a key file


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the HTTP server. The defaults are for one person on one machine.

    Numbers are in the ranges of the command line's options. Raises InvalidRequest if a host or an
    origin is invalid.
    """

    host: str = "127.0.0.1"
    """The address to listen at; one that other machines can reach requires an API key."""
    port: int = 0
    """0 selects a free one."""
    name: str | None = None
    """The model's name in the API; None: its name when loaded, or the last part of its path."""
    aliases: tuple[str, ...] = ()
    """Further names of the model."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Valid keys; each request must have one. Empty: no key is required."""
    hosts: tuple[str, ...] | None = None
    """Allowed values of the Host header, without a port; * allows any. None: any, or the names of
    this machine if only this machine can reach the server."""
    root_path: str = ""
    """Path of the server behind a proxy, such as /m/x; optional in requests."""
    behind_router: bool = False
    """True if only a router has the key, and names the client of each request."""
    no_auth: bool = False
    """True if other machines may reach a server without keys."""
    origins: tuple[str, ...] = ()
    """Allowed origins (scheme://host:port) of web pages; * allows any."""
    drafter: str = "auto"
    """Drafter of a request that names none."""
    policy: str = "auto"
    max_block: int | None = None
    think: bool | None = None
    """Default for reasoning in a chat; None: the default of its chat template."""
    parse_special: bool = False
    """True if names of special tokens in messages become the tokens."""
    default_max_tokens: int | None = None
    """Token limit of a chat answer without one; None: 16,384, or half the context if that is
    less."""
    max_waiting: int = 256
    """Maximum requests in the queue."""
    max_running: int = 64
    """Maximum concurrent requests."""
    max_connections: int | None = None
    """Maximum connections, if the limit on open files allows; None: 1024 beyond the
    requests that may run and wait."""
    prompt_cache_bytes: int | None = None
    """Limit of all models' prompt KV on disk; None disables the cache on disk."""
    body_bytes: int = 8 * 2**20
    """Size limit of a body."""
    header_seconds: float = 10.0
    """Time limit for a client to send the headers of a request."""
    body_seconds: float = 30.0
    """Time limit for a client to send a body."""
    reading_seconds: float = 300.0
    """Time limit for a client that reads nothing of the data sent to it."""
    request_seconds: float | None = None
    """Time limit of an answer, including the queue; None: no limit."""
    keepalive_seconds: float = 15.0
    """Idle time until a stream gets a comment, so that proxies keep it open."""
    grace_seconds: float = 30.0
    """Time that running answers may continue after the server was asked to stop."""

    def __post_init__(self) -> None:
        for host in self.hosts or ():
            if not _is_host(host):
                raise InvalidRequest(
                    f"invalid allowed host {host!r}; expected a host name or an address, without "
                    "scheme, brackets and port, or *"
                )
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise InvalidRequest(f"root path {self.root_path!r} is not a path such as /m/x")
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidRequest(
                    f"invalid origin {origin!r}; expected scheme://host or scheme://host:port in "
                    "lower case without a path, as browsers send it, or *"
                )


def _is_host(text: str) -> bool:
    """Return whether the text can be a Host header without its port."""
    if text == "*" or _NAME.fullmatch(text):
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def api_keys(
    words: Sequence[str], file: Path | None, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the keys of `--api-key` and `--api-key-file`, or else of the environment.

    Raises InvalidRequest if a key is invalid, or the file cannot be read or has no key. The
    message names the source, never the key.
    """
    keys = [_check_key(key, "--api-key") for key in words]
    if file is not None:
        keys += _from_file(file)
    if not keys and KEY_VARIABLE in environment:
        keys = [_check_key(environment[KEY_VARIABLE], f"the environment variable {KEY_VARIABLE}")]
    return tuple(keys)


def _fault(key: str) -> str | None:
    """Return why a key is invalid, or None if it is valid."""
    if not key.strip():
        return "is empty"
    if key != key.strip():
        return "begins or ends with white space"
    if any(ord(letter) < 0x20 or ord(letter) == 0x7F for letter in key):
        return "has a control character, which no header can carry"
    return None


def encode_keys(keys: Iterable[str]) -> list[bytes]:
    """Return keys as clients send them: UTF-8, or the shell's bytes if those are not UTF-8."""
    return [key.encode("utf-8", "surrogateescape") for key in keys]


def _check_key(key: str, source: str) -> str:
    key = key.removeprefix("\ufeff")  # of a file that the shell has read
    if fault := _fault(key):
        raise InvalidRequest(f"{source}: the API key {fault}; set it, or remove the option")
    return key


def _from_file(path: Path) -> list[str]:
    """Read one key per line; lines with # are comments, as in llama.cpp."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read --api-key-file {path}: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise InvalidRequest(f"--api-key-file {path} is larger than {_MAX_BYTES} bytes")
    content = unmarked(content, f"--api-key-file {path}")
    lines = content.decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")
    keys = [
        _check_key(line.removesuffix("\r"), f"--api-key-file {path}, line {number}")
        for number, line in enumerate(lines, 1)
        if not line.startswith("#")
    ]
    if not keys:
        raise InvalidRequest(f"--api-key-file {path} has no key; expected one per line")
    return keys
