"""Messages that were typed in chats, kept for the history of later ones where answers are (--keep).

Invariant: readable by this user alone; what cannot be read or written is left out.
"""

import contextlib
import json
import os
from pathlib import Path

from paceline.storage.files import append_bytes
from paceline.system.machine import cache_dir

MAX_MESSAGES = 1000
"""Older ones are dropped when there are twice as many."""


def history_file() -> Path:
    """The file of all messages: a JSON string on each line."""
    return cache_dir() / "history" / "chat.jsonl"


class KeptHistory:
    """The messages of earlier chats of this user."""

    def __init__(self) -> None:
        self._path = history_file()

    def messages(self) -> list[str]:
        """The newest messages, oldest first."""
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return []
        messages = [text for line in lines if (text := _message(line)) is not None]
        newest = messages[-MAX_MESSAGES:]
        if len(messages) > 2 * MAX_MESSAGES:
            with contextlib.suppress(OSError):
                shorter = self._path.with_name(f".{self._path.name}.{os.getpid()}")
                append_bytes(shorter, b"".join(map(_line, newest)))
                shorter.replace(self._path)
        return newest

    def add(self, message: str) -> None:
        """Keep one more message, if the file can be written."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            append_bytes(self._path, b"\n" + _line(message))  # a full disk may have cut a line


def _line(message: str) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _message(line: bytes) -> str | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, str) else None
