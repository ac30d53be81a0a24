"""A terminal for typing messages: line editing, history, paste, and messages of several lines.

Independent of a message's meaning. Invariant: keys pressed at any time, and text pasted while an
answer streams, appear at the next prompt; only Ctrl-C is not text.

With --keep, messages are saved for the history of later chats. Only this user can read them; read
and write errors are ignored.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.cli.console import print_status
from paceline.system.machine import cache_dir, unseen_keys

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


QUOTES = '"""'  # around a message of several lines
HINT = 'Enter sends, """ begins several lines, Ctrl-C stops an answer; /help has the rest.'
_ENDS = "Ctrl-C again, Ctrl-D or /bye ends the chat."


class Terminal:
    """Reads messages, and answers to questions."""

    def __init__(self, commands: Sequence[str], *, keep: bool) -> None:
        """Complete `commands`; with `keep`, save messages for the history of later chats."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.output import DummyOutput, create_output
        from prompt_toolkit.utils import is_dumb_terminal

        self._interrupted = False  # Ctrl-C was the last key
        self._pasted_quotes = False  # the quotes at the beginning were pasted
        is_dumb = is_dumb_terminal()  # it cannot move a cursor
        self._output = DummyOutput() if is_dumb else create_output(_screen())
        output = None if is_dumb else self._output
        self._session: Any = PromptSession(
            history=_kept_history() if keep else InMemoryHistory(),
            output=output,
            key_bindings=self._bindings(),
            completer=WordCompleter([*commands], sentence=True),
            complete_while_typing=False,
            enable_open_in_editor=True,
            enable_suspend=True,
        )
        self._session.default_buffer.on_text_changed += self._typed
        self._question: Any = PromptSession(output=output)

    def message(self) -> str | None:
        """Return the next message that is not blank, without quotes, or None at the chat's end."""
        while True:
            self._pasted_quotes = False
            try:
                text = self._prompt(self._session, "> ")
            except KeyboardInterrupt:
                if self._interrupted:
                    return None
                self._interrupted = True
                print_status(_ENDS)
                continue
            except EOFError:
                return None
            self._interrupted = False
            message = text if self._pasted_quotes else _unquoted(text)
            if not message.strip():
                continue
            return message.strip("\n")

    def ask(self, question: str) -> str:
        """Return the stripped answer to a question; empty after Ctrl-C or Ctrl-D."""
        try:
            return self._prompt(self._question, question).strip()
        except (KeyboardInterrupt, EOFError):
            return ""

    @contextmanager
    def holding_keys(self) -> Iterator[None]:
        """Keep keys typed between prompts for the next prompt, unseen."""
        with unseen_keys():
            self._mark_pastes()
            try:
                yield
            finally:
                self._output.disable_bracketed_paste()
                self._output.flush()

    def _prompt(self, session: Any, text: str) -> str:
        try:
            return str(session.prompt(text))
        finally:
            self._mark_pastes()

    def _mark_pastes(self) -> None:
        """Let the terminal mark a paste, as it does at a prompt."""
        self._output.enable_bracketed_paste()
        self._output.flush()

    def _typed(self, buffer: Any) -> None:
        if buffer.text:
            self._interrupted = False

    def _bindings(self) -> "KeyBindings":
        from prompt_toolkit.enums import DEFAULT_BUFFER
        from prompt_toolkit.filters import has_focus
        from prompt_toolkit.key_binding import KeyBindings

        bindings, typing = KeyBindings(), has_focus(DEFAULT_BUFFER)

        @bindings.add("enter", filter=typing, eager=True)  # a dumb terminal has its own
        def send(event: "KeyPressEvent") -> None:
            buffer = event.current_buffer
            if _is_open(buffer.text) and not self._pasted_quotes:
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @bindings.add("escape", "enter", filter=typing)
        def newline(event: "KeyPressEvent") -> None:
            event.current_buffer.insert_text("\n")

        @bindings.add("<bracketed-paste>", filter=typing)
        def paste(event: "KeyPressEvent") -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            if not event.current_buffer.text:
                self._pasted_quotes = text.startswith(QUOTES)
            event.current_buffer.insert_text(text)

        @bindings.add("c-c", filter=typing)
        @bindings.add("<sigint>", filter=typing)
        def clear(event: "KeyPressEvent") -> None:
            event.current_buffer.append_to_history()  # the up key restores it
            event.app.exit(exception=KeyboardInterrupt)

        return bindings


def history_file() -> Path:
    """Return the file of all messages, in prompt_toolkit's format."""
    return cache_dir() / "history" / "chat"


def _kept_history() -> "History":
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


def _is_open(text: str) -> bool:
    """Return whether a message began with quotes that are not closed yet."""
    text = text.strip()
    return text.startswith(QUOTES) and not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES))


def _unquoted(text: str) -> str:
    stripped = text.strip()
    if not stripped.startswith(QUOTES) or _is_open(stripped):
        return text
    return stripped[len(QUOTES) : -len(QUOTES)]


def _screen() -> TextIO:
    """Return the prompt's output: stdout or stderr if a terminal, else the keyboard's terminal."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            return stream
    if sys.platform == "win32":
        return Path("CONOUT$").open("w", encoding="utf-8")
    return Path(os.ttyname(sys.stdin.fileno())).open("w", encoding="utf-8")
