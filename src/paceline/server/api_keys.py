"""API keys, from the command line, a file or the environment.

The rule: a key that was given and is empty is an error, wherever it came from. A shell variable
that is not set must not make a server that anyone may use.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paceline.errors import InvalidRequest

VARIABLE = "PACELINE_API_KEY"
"""The environment variable of a key."""

_MOST_BYTES = 2**20
"""The largest file of keys."""


def api_keys(
    given: Sequence[str], file: Path | None, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """The keys of `--api-key` and `--api-key-file`; without either, of the environment.

    Raises:
        InvalidRequest: a key cannot be used, or the file cannot be read or has no key. The message
            names the source, and never the key.
    """
    keys = [_checked(key, "--api-key") for key in given]
    if file is not None:
        keys += _from_file(file)
    if not keys and VARIABLE in environment:
        keys = [_checked(environment[VARIABLE], f"the environment variable {VARIABLE}")]
    return tuple(keys)


def fault_of(key: str) -> str | None:
    """Why a key cannot be used; None: it can be."""
    if not key.strip():
        return "is empty"
    if key != key.strip():
        return "begins or ends with white space"
    if any(ord(letter) < 0x20 or ord(letter) == 0x7F for letter in key):
        return "has a control character, which no header can carry"
    return None


def encoded(keys: Iterable[str]) -> list[bytes]:
    """Keys as clients send them: UTF-8, or the bytes that the shell gave where they are not."""
    return [key.encode("utf-8", "surrogateescape") for key in keys]


def _checked(key: str, source: str) -> str:
    if fault := fault_of(key):
        raise InvalidRequest(f"{source}: the API key {fault}; give a key, or leave it out")
    return key


def _from_file(path: Path) -> list[str]:
    """One key a line; lines that begin with # are comments, as in llama.cpp."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read --api-key-file {path}: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise InvalidRequest(f"--api-key-file {path} is larger than {_MOST_BYTES} bytes")
    lines = content.decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")
    keys = [
        _checked(line.removesuffix("\r"), f"--api-key-file {path}, line {number}")
        for number, line in enumerate(lines, 1)
        if not line.startswith("#")
    ]
    if not keys:
        raise InvalidRequest(f"--api-key-file {path} has no key; expected one a line")
    return keys
