"""A conversation in a file: a JSON list of messages, as the APIs have them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest

_ROLES = ("system", "developer", "user", "assistant", "tool")


def path_of(name: str) -> Path:
    """The path that a user means. Raises InvalidRequest for a ~user that is unknown."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise InvalidRequest(f"{name} is no path: {error}") from error


def write_chat(path: Path, messages: Sequence[Mapping[str, Any]]) -> None:
    """Write messages. Raises InvalidRequest if the file cannot be written."""
    from paceline.storage.files import write_bytes, writing

    text = json.dumps(messages, ensure_ascii=False, indent=1)
    try:
        with writing(path):
            write_bytes(path, text.encode("utf-8", "surrogatepass"))
    except InvalidRequest:
        raise
    except ValueError as error:  # a zero byte in the name
        raise InvalidRequest(f"cannot write {path}: {error}") from error


def read_chat(path: Path) -> list[Mapping[str, Any]]:
    """Messages of a file that `write_chat` wrote, or of a request to a chat API.

    Raises InvalidRequest if it cannot be read, or is no such file.
    """
    try:
        value = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is no saved chat: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f"{path} is no saved chat: expected a list of messages")
    for number, message in enumerate(messages, start=1):
        if not _is_message(message):
            raise InvalidRequest(
                f"{path} is no saved chat: message {number} of {len(messages)} should have a role "
                f"({', '.join(_ROLES)}) and a text as content"
            )
    return messages


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in _ROLES
        and isinstance(value.get("content"), str)
    )
