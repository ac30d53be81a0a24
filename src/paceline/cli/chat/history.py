"""Messages typed in chats, saved for the history of later ones together with answers (--keep).

Invariant: only this user can read them; read and write errors are ignored.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.system.machine import cache_dir

if TYPE_CHECKING:
    from prompt_toolkit.history import History


def history_file() -> Path:
    """Return the file of all messages, in prompt_toolkit's format."""
    return cache_dir() / "history" / "chat"


def kept_history() -> "History":
    """Return the messages of this user's earlier chats; new messages are added to them."""
    from prompt_toolkit.history import FileHistory

    class KeptHistory(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            with suppress(OSError):
                return super().load_history_strings()
            return []

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    path = history_file()
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    return KeptHistory(path)
