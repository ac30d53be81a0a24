"""Finds `llama-server`, its version, and its n-gram lookups.

A path can name any program, so it is first run with --version and --help only, for a limited time,
before it is accepted.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from paceline.errors import InvalidRequest, MissingExtra

PROGRAM = "llama-server"

LOOKUPS = ("ngram-simple", "ngram-mod", "ngram-cache")
"""Values of --spec-type that draft from n-grams alone; ngram-map-k is a form of ngram-simple."""

_SECONDS = 30.0
"""Time limit for the help, in seconds; a real server takes 0.1 s."""

_VERSION = re.compile(r"^version: (.+)$", re.MULTILINE)


class ServerBinary(NamedTuple):
    """A `llama-server` that can be started."""

    path: Path
    version: str
    """The version as printed: a number, and the commit in brackets."""
    lookups: tuple[str, ...]
    """The supported `LOOKUPS`."""

    @property
    def lacking(self) -> str:
        """A sentence about the unsupported lookups; empty if all are supported."""
        missing = [name for name in LOOKUPS if name not in self.lookups]
        if not missing:
            return ""
        option = f"no {', '.join(missing)}" if self.lookups else "no --spec-type"
        return (
            f"{PROGRAM} {self.version} has {option}: rows of {', '.join(missing)} are left out; "
            "a newer one has them"
        )


def server_binary(path: str | None) -> ServerBinary:
    """Return the server at a path; with None, the first on PATH.

    Raises:
        InvalidRequest: the path is not a program, or not a `llama-server`.
        MissingExtra: `path` is None, and PATH has no server.
    """
    place = shutil.which(path or PROGRAM)
    if place is None and path is None:
        raise MissingExtra(
            f"{PROGRAM} is not on PATH: install llama.cpp, or name the program with --llama-server"
        )
    if place is None:
        raise InvalidRequest(
            f"{path} is not executable; expected the path of llama.cpp's {PROGRAM}"
        )
    version = _VERSION.search(_output(place, "--version"))
    manual = _output(place, "--help") if version else ""
    if version is None or "--port" not in manual:
        raise InvalidRequest(
            f"{place} is not {PROGRAM}: it lacks --version and --port, which llama.cpp's server "
            "has; expected the path of that program"
        )
    types = manual.partition("--spec-type")[2].partition("\n")[0]
    lookups = tuple(name for name in LOOKUPS if name in re.split(r"[\s,|\[\]]+", types))
    return ServerBinary(Path(place).resolve(), version[1].strip(), lookups)


def _output(program: str, option: str) -> str:
    """Return a program's output, both streams; nothing if it does not end."""
    try:
        return subprocess.run(
            [program, option],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        ).stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        return ""
    except OSError as error:  # not an executable of this system
        raise InvalidRequest(f"{program} cannot be started: {error.strerror}") from error
