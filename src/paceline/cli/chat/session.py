"""A chat without its input: the model, the conversation, the options, and the steps.

Invariant: a step that fails or is stopped leaves the conversation as it was before, and `undo` goes
back one step at a time.
"""

import contextlib
import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.cli.answers import (
    AnswerArguments,
    load_for_answers,
    print_end,
    short_statistics,
    step_printer,
)
from paceline.cli.chat.terminal import Terminal
from paceline.cli.console import json_text, print_error, print_status, progress_of, read_text
from paceline.cli.options import ModelOptions, Output
from paceline.drafters import DrafterSpec
from paceline.errors import ContextFull, InvalidRequest, PacelineError
from paceline.models import ModelFiles, resolve
from paceline.runtime.conversation import Conversation
from paceline.runtime.model import Model
from paceline.runtime.prompt import encode_prompt
from paceline.runtime.request import check
from paceline.runtime.stream import Stream
from paceline.storage.files import write_bytes, writing

Messages = list[Mapping[str, Any]]

_MAX_UNDONE = 1000  # steps

_ROLES = ("system", "developer", "user", "assistant", "tool")


class Session:
    def __init__(
        self,
        model: ModelOptions,
        answer: AnswerArguments,
        output: Output,
        *,
        drop_oldest: bool = False,
    ) -> None:
        self._model, self._answer, self._output = model, answer, output
        self._drop_oldest = drop_oldest
        self._terminal: Terminal | None = None
        self._loaded: Model | None = None
        self.saved_as = ""  # the file that this chat was written to or read from
        self._before: list[tuple[Messages, str]] = []  # before each step, and the step
        options = answer.options()
        check(options)  # before a model is loaded
        self.options: dict[str, Any] = {**options}  # for the next answers
        system = self.options.pop("system", None)
        self.messages: Messages = [{"role": "system", "content": system}] if system else []

    def open(self, terminal: Terminal | None = None) -> None:
        """Load the model; with a `terminal`, prompt the user when the context is full."""
        self._terminal = terminal
        self._load(self._model)

    def close(self) -> None:
        """Free the model, and wait for its background work."""
        if self._loaded is not None:
            self._loaded.flush()
            self._loaded = None
            gc.collect()  # the next model needs the memory

    @property
    def model(self) -> str:
        return self._model.model

    @property
    def system(self) -> str | None:
        return next((m["content"] for m in self.messages if m["role"] == "system"), None)

    @property
    def last_answer(self) -> str | None:
        answers = (m["content"] for m in reversed(self.messages) if m["role"] == "assistant")
        return next(answers, None)

    def turn(
        self, message: str, step: str = "the last message", after: Messages | None = None
    ) -> bool:
        """Answer one message, and print the answer; return whether it has a token.

        The message follows the messages `after`; None: all messages.
        """
        if self._loaded is None:
            raise InvalidRequest("no model is loaded; /model NAME loads one")
        conversation = self._loaded.conversation(self.messages if after is None else after)
        stream = self._send(conversation, message)
        self._print(stream)
        if has_token := bool(stream.result.token_ids):
            self._change(conversation.messages, step)
        if self._output.json:
            print(json_text(stream.result.as_dict()), flush=True)
        else:
            result, full = stream.result, self._answer.stats or self.options.get("probe")
            line = result.line() if full else short_statistics(result)
            print_end(stream, self._output, line, chat=self._terminal is not None)
        return has_token

    def _print(self, stream: Stream) -> None:
        """Print the steps of an answer, until it ends or Ctrl-C is pressed at the terminal."""
        with stream:
            show = step_printer(self._answer, self._output, stream)
            try:
                for part in stream:
                    show(part)
            except KeyboardInterrupt:
                if self._terminal is None:
                    raise

    def answer_again(self) -> None:
        """Replace the last answer. Raises InvalidRequest if there is none."""
        before, text = self.messages, self.last_answer
        places = [place for place, message in enumerate(before) if message["role"] == "user"]
        if not places or text is None:
            raise InvalidRequest("nothing to regenerate: the chat has no answer yet")
        answered = self.turn(before[places[-1]]["content"], "/regen", before[: places[-1]])
        if answered and self.last_answer == text:
            print_status("[the same answer: /set temperature 0.7 or /set seed default varies it]")

    def set_system(self, text: str) -> None:
        """Replace the system message; an empty text removes it."""
        others = [message for message in self.messages if message["role"] != "system"]
        first: Messages = [{"role": "system", "content": text}] if text else []
        self._change([*first, *others], "/system")

    def clear(self) -> None:
        """Begin again with the system message, and without a file to save to."""
        self.saved_as = ""
        self._change([m for m in self.messages if m["role"] == "system"], "/clear")

    def undo(self) -> str:
        """Go back one step and return its name. Raises InvalidRequest if there is none."""
        if not self._before:
            raise InvalidRequest("nothing to undo")
        self.messages, step = self._before.pop()
        return step

    def save(self, name: str) -> None:
        """Write the conversation to a file: the named one, its own, or one that the user names.

        Raises InvalidRequest if it cannot be written, or if it exists and belongs to another chat.
        """
        name = name or self.saved_as or (self._terminal.ask("File: ") if self._terminal else "")
        if not name:
            return
        path = path_of(name)
        exists = False
        with contextlib.suppress(OSError, ValueError):  # writing raises a better error
            exists = path.exists()
        if exists and str(path) != self.saved_as:
            raise InvalidRequest(f"{path} exists already; choose another name")
        write_chat(path, self.messages)
        self.saved_as = str(path)
        print_status(f"{len(self.messages)} messages are in {path}.")

    def restore(self, name: str) -> None:
        """Continue a saved conversation. Raises InvalidRequest if it cannot be read."""
        path = path_of(name)
        self._change(read_chat(path), "/load")
        self.saved_as = str(path)

    def set_options(self, options: dict[str, Any]) -> None:
        """Set the options of the next answers. Raises InvalidRequest for unsupported ones."""
        if self._loaded is not None:
            self._check(self._loaded.files, options)
            self._loaded.drafting.prepare([DrafterSpec.parse(options.get("drafter", "auto"))])
        self.options = options

    def change_model(self, name: str) -> None:
        """Continue with another model; after a failure, with the same. Raises PacelineError."""
        options = replace(self._model, model=name, revision=None)
        # Most mistakes end here, while the model is still loaded.
        self._check(resolve(name, progress=progress_of(self._output), engine=options.engine))
        old = self._model
        self.close()
        try:
            self._load(options)
        except BaseException:
            with contextlib.suppress(PacelineError):
                self._load(old)
            raise

    def _load(self, options: ModelOptions) -> None:
        loaded = load_for_answers(options, self._answer, self._output, self._check)
        self._loaded, self._model = loaded, options

    def _check(self, files: ModelFiles, options: dict[str, Any] | None = None) -> None:
        """Raise the template's error for the conversation with one more message, if any."""
        messages = [*self.messages, {"role": "user", "content": "Hello"}]
        encode_prompt(files, messages, check(self.options if options is None else options))  # type: ignore[arg-type]

    def _change(self, messages: Sequence[Mapping[str, Any]], step: str) -> None:
        self._before = [*self._before[1 - _MAX_UNDONE :], (self.messages, step)]
        self.messages = [*messages]

    def _send(self, conversation: Conversation, message: str) -> Stream:
        """Return the stream of an answer, after dropping turns if the context is full."""
        try:
            return conversation.send(message, **self.options)
        except ContextFull as full:
            if full.turns is None or not self._may_drop(full, full.turns, conversation.turns):
                raise
            conversation.drop_oldest(full.turns)
            return conversation.send(message, **self.options)

    def _may_drop(self, full: ContextFull, count: int, total: int) -> bool:
        """Return whether the oldest turns may be dropped, by the option or the user's answer."""
        turns = f"the oldest {count} of {total} turns"
        counts = f"the context is full: {full.tokens} of {full.context} tokens"
        if self._drop_oldest:
            if not self._output.quiet:
                print_status(f"[{counts}; dropped {turns}]")
            return True
        if self._terminal is None:
            return False
        print_status(f"{counts[0].upper()}{counts[1:]}, with the new message.")
        while True:
            answer = self._terminal.ask(f"Drop {turns} and continue? [y]es, [n]o, [s]ave first: ")
            match answer.lower():
                case "y" | "yes":
                    return True
                case "" | "n" | "no":
                    print_status("Nothing was dropped, and the message was not sent.")
                    return False
                case "s" | "save":
                    try:
                        if name := self._terminal.ask("File: "):
                            self.save(name)
                    except InvalidRequest as error:
                        print_error(error)


def path_of(name: str) -> Path:
    """Return the path that a user typed. Raises InvalidRequest for an unknown ~user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise InvalidRequest(f"{name} is not a path: {error}") from error


def write_chat(path: Path, messages: Sequence[Mapping[str, Any]]) -> None:
    """Write messages. Raises InvalidRequest if the file cannot be written."""
    text = json.dumps(messages, ensure_ascii=False, indent=1)
    try:
        with writing(path):
            write_bytes(path, text.encode("utf-8", "backslashreplace"))
    except InvalidRequest:
        raise
    except ValueError as error:  # a zero byte in the name
        raise InvalidRequest(f"cannot write {path}: {error}") from error


def read_chat(path: Path) -> list[Mapping[str, Any]]:
    """Return the messages of a file that `write_chat` wrote, or of a request to a chat API.

    Raises InvalidRequest if it cannot be read, or is not such a file.
    """
    try:
        value = json.loads(read_text(path.absolute()))  # - is an ordinary name
    except PacelineError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not a saved chat: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f"{path} is not a saved chat: expected a list of messages")
    for number, message in enumerate(messages, start=1):
        if not _is_message(message):
            raise InvalidRequest(
                f"{path} is not a saved chat: message {number} of {len(messages)} needs a role "
                f"({', '.join(_ROLES)}) and a text as content"
            )
    return messages


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in _ROLES
        and isinstance(value.get("content"), str)
    )
