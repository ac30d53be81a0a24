"""Server settings, each declared once: `paceline serve` has the fields with a help as options.

Invariant: an empty key is an error, whatever its source. An unset shell variable must not start a
server without keys.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from paceline.errors import InvalidRequest
from paceline.options import COUNT, OPTIONS, About, FloatRange
from paceline.storage.text import unmarked

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
"""A host name."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
"""An origin, as browsers serialize it: RFC 6454, section 6.2."""

_ROOT_PATH = re.compile(r"(/[\w.~-]+)*")

KEY_VARIABLE = "PACELINE_API_KEY"  # environment variable
_MAX_BYTES = 2**20  # of a key file

_YEAR = 365 * 24 * 3600
_TIMEOUT = FloatRange(0, _YEAR, open=True)
_GIGABYTES = FloatRange(0, 1e6, open=True)

_server, _access, _load, _models = (
    partial(About, panel) for panel in ("Options", "Access", "Load", "Several models")
)
_drafter, _policy, _max_block, _think = (
    OPTIONS[name].about._replace(panel="Defaults of requests")
    for name in ("drafter", "policy", "max_block", "think")
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the HTTP server. The defaults are for one person on one machine.

    Raises InvalidRequest if a host or an origin is invalid.
    """

    host: Annotated[str, _access("address to listen on; a public one needs --api-key")] = (
        "127.0.0.1"
    )
    port: int = 0
    """0 selects a free one."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Valid keys; each request must have one. Empty: no key is required."""
    behind_router: bool = False
    """True if only a router has the key, and names the client of each request."""
    no_auth: Annotated[bool, _access("accept requests without a key, even on a public address")] = (
        False
    )
    hosts: Annotated[
        Sequence[str],
        _access("allowed value of the Host header; may be repeated", "--allow-host", "HOST"),
    ] = ()
    """Without a port; * allows any. Empty: any, or the names of this machine if only this machine
    can reach the server."""
    origins: Annotated[
        Sequence[str],
        _access(
            "scheme://host:port of a web page that may send requests; may be repeated", "--origin"
        ),
    ] = ()
    """* allows any."""
    root_path: Annotated[str, _access("path of the server behind a proxy, such as /m/x")] = ""
    """Optional in requests."""
    name: Annotated[str | None, _server("the model's name in the API; default: its own name")] = (
        None
    )
    aliases: Annotated[
        Sequence[str], _server("another name of the model; may be repeated", "--alias")
    ] = ()
    queue: Annotated[int, COUNT, _load("maximum waiting requests")] = 256
    max_concurrent: Annotated[int, COUNT, _load("maximum concurrent requests")] = 64
    connections: Annotated[
        int | None,
        COUNT,
        _load(
            "connections at a time, as far as the limit on open files allows; default: 1024 more "
            "than may run and wait"
        ),
    ] = None
    timeout: Annotated[
        float | None, _TIMEOUT, _load("maximum seconds per request, including the queue")
    ] = None
    shutdown_timeout: Annotated[
        float, FloatRange(0, _YEAR), _load("seconds for running requests at shutdown")
    ] = 30.0
    prompt_cache: Annotated[
        float | None,
        _GIGABYTES,
        _load("maximum size of the prompt cache on disk; default: in memory only", "", "GB"),
    ] = None
    max_loaded_models: Annotated[int, COUNT, _models("maximum models in memory")] = 1
    memory: Annotated[
        float | None,
        _GIGABYTES,
        _models(
            "maximum memory of the loaded models, as estimated; default: the machine's", "", "GB"
        ),
    ] = None
    keep_alive: Annotated[
        float | None, _TIMEOUT, _models("unload a model after this idle time", "", "SECONDS")
    ] = None
    drafter: Annotated[str, _drafter] = "auto"
    policy: Annotated[str, _policy] = "auto"
    max_block: Annotated[int | None, OPTIONS["max_block"].values, _max_block] = None
    think: Annotated[bool | None, _think] = None
    default_max_tokens: Annotated[
        int | None,
        COUNT,
        About(
            "Defaults of requests",
            "tokens of an answer to a chat without max_tokens; default: 16384, or half the context "
            "if that is less",
        ),
    ] = None
    parse_special: Annotated[
        bool,
        _server(
            "names of special tokens in messages become the tokens; only for clients that you trust"
        ),
    ] = False
    body_bytes: int = 8 * 2**20
    """Size limit of a body."""
    header_seconds: float = 10.0
    """Time limit for a client to send the headers of a request."""
    body_seconds: float = 30.0
    """Time limit for a client to send a body."""
    reading_seconds: float = 300.0
    """Time limit for a client that reads nothing of the data sent to it."""
    keepalive_seconds: float = 15.0
    """Idle time until a stream gets a comment, so that proxies keep it open."""

    def __post_init__(self) -> None:
        for host in self.hosts:
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


def encode_keys(keys: Iterable[str]) -> list[bytes]:
    """Return keys as clients send them: UTF-8, or the shell's bytes if those are not UTF-8."""
    return [key.encode("utf-8", "surrogateescape") for key in keys]


def _check_key(key: str, source: str) -> str:
    key = key.removeprefix("\ufeff")  # of a file that the shell has read
    for is_wrong, fault in (
        (not key.strip(), "is empty"),
        (key != key.strip(), "begins or ends with white space"),
        (
            any(ord(letter) < 0x20 or ord(letter) == 0x7F for letter in key),
            "has a control character, which no header can carry",
        ),
    ):
        if is_wrong:
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
