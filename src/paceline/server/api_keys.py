"""API keys from the command line, a file or the environment.

Invariant: an empty key is an error, whatever its source. An unset shell variable must not start a
server without keys.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paceline.errors import InvalidRequest

VARIABLE = "PACELINE_API_KEY"
"""The environment variable of a key."""

_MAX_BYTES = 2**20
"""Size limit of a key file."""


def api_keys(
    words: Sequence[str], file: Path | None, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """The keys of `--api-key` and `--api-key-file`; without them, of the environment.

    Raises InvalidRequest if a key is not valid, or the file cannot be read or has no key. The
    message names the source, never the key.
    """
    keys = [_checked(key, "--api-key") for key in words]
    if file is not None:
        keys += _from_file(file)
    if not keys and VARIABLE in environment:
        keys = [_checked(environment[VARIABLE], f"the environment variable {VARIABLE}")]
    return tuple(keys)


def _fault(key: str) -> str | None:
    """Why a key is not valid; None: it is valid."""
    if not key.strip():
        return "is empty"
    if key != key.strip():
        return "begins or ends with white space"
    if any(ord(letter) < 0x20 or ord(letter) == 0x7F for letter in key):
        return "has a control character, which no header can carry"
    return None


def encode_keys(keys: Iterable[str]) -> list[bytes]:
    """Keys as clients send them: UTF-8, or the shell's bytes if those are not UTF-8."""
    return [key.encode("utf-8", "surrogateescape") for key in keys]


def _checked(key: str, source: str) -> str:
    if fault := _fault(key):
        raise InvalidRequest(f"{source}: the API key {fault}; set it, or remove the option")
    return key


def _from_file(path: Path) -> list[str]:
    """Read one key a line; lines with # are comments, as in llama.cpp."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read --api-key-file {path}: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise InvalidRequest(f"--api-key-file {path} is larger than {_MAX_BYTES} bytes")
    lines = content.decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")
    keys = [
        _checked(line.removesuffix("\r"), f"--api-key-file {path}, line {number}")
        for number, line in enumerate(lines, 1)
        if not line.startswith("#")
    ]
    if not keys:
        raise InvalidRequest(f"--api-key-file {path} has no key; expected one a line")
    return keys
