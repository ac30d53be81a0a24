"""How a server is set up: one frozen object, made where the server is started."""

from dataclasses import dataclass, field, fields

from paceline.errors import InvalidRequest
from paceline.server.api_keys import fault_of

MOST_SECONDS = 365 * 24 * 3600
"""The longest time that a setting can say; more than it overflows clocks."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the HTTP server. The defaults are for one person on one machine.

    Raises:
        InvalidRequest: a number is out of its range, or an API key is empty.

    """

    name: str | None = None
    """What the model is called; None: as it was loaded, of a path the last part."""
    aliases: tuple[str, ...] = ()
    """Other names that requests may use for it."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Requests have to bring one of these; without any, all may ask."""
    hosts: tuple[str, ...] | None = None
    """What the Host header may say, without a port; * is anything. None: anything, or where only
    this machine can reach the server, its own names."""
    anyone: bool = False
    """Whether others may reach a server without keys."""
    origins: tuple[str, ...] = ()
    """Web pages (scheme://host:port) that may ask from a browser; * is all of them."""
    drafter: str = "auto"
    """Who drafts where a request does not say."""
    policy: str = "auto"
    max_block: int | None = None
    most_waiting: int = 256
    """Requests that may wait for their turn."""
    most_running: int = 64
    """Answers that are written at once."""
    body_bytes: int = 8 * 2**20
    """The largest body."""
    header_seconds: float = 10.0
    """How long a client may take to send a request's headers."""
    body_seconds: float = 30.0
    """How long a client may take to send a body."""
    reading_seconds: float = 300.0
    """How long a client may take nothing of what waits for it."""
    request_seconds: float | None = None
    """How long an answer may take, waiting included; None: as long as it likes."""
    keepalive_seconds: float = 15.0
    """After so long without news a stream gets a comment, so that nobody hangs up."""
    grace_seconds: float = 30.0
    """How long answers may go on once the server was told to end."""

    def __post_init__(self) -> None:
        for name in ("most_waiting", "most_running", "body_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"{name} is {value!r}; expected a whole number of 1 or more")
        for field_ in fields(self):
            if field_.name.endswith("_seconds"):
                _check_seconds(field_.name, getattr(self, field_.name))
        for key in self.api_keys:
            if fault := fault_of(key):
                raise InvalidRequest(f"an API key {fault}")


def _check_seconds(name: str, value: float | None) -> None:
    if value is None and name == "request_seconds":
        return
    least = "0" if name == "grace_seconds" else "above 0"
    fits = isinstance(value, int | float) and 0 <= value <= MOST_SECONDS
    if not fits or (value == 0 and least != "0"):
        raise InvalidRequest(f"{name} is {value!r}; expected {least} to {MOST_SECONDS} seconds")
