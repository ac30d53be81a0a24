"""`paceline chat`: a message a line, from a terminal or a pipe, and an answer to each.

Invariant: no turn ends the chat. A turn that fails is a line on standard error, and the
conversation is as it was before it.
"""

import contextlib
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.answers import AnswerArguments, load_for_answers, print_end, step_printer
from paceline.cli.options import ModelOptions, Output, command, group
from paceline.errors import ContextFull, PacelineError

if TYPE_CHECKING:
    from paceline.runtime.conversation import Conversation

app = group()

_HELP = "An empty line or Ctrl-D ends the chat; Ctrl-C stops an answer."


@command(app)
def chat(
    *,
    drop_oldest: Annotated[
        bool,
        Option(
            "--drop-oldest",
            help="when the context is full, drop the oldest turns and go on, without asking",
        ),
    ] = False,
    answer: AnswerArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Chat. Of the earlier turns, only the last answer is prefilled again."""
    # The exit code of a script is 2 if a message was not answered; at a terminal it is 0.
    from paceline.runtime.request import check

    check(answer.options())  # before the model is loaded
    system = [] if answer.system is None else [{"role": "system", "content": answer.system}]
    loaded = load_for_answers(model, answer, output)
    with contextlib.closing(loaded.conversation(system)) as conversation:
        code = _Chat(conversation, answer, output, drop_oldest=drop_oldest).run()
    loaded.settle()
    return code


class _Chat:
    """Reads messages and prints answers."""

    def __init__(
        self,
        conversation: "Conversation",
        answer: AnswerArguments,
        output: Output,
        *,
        drop_oldest: bool,
    ) -> None:
        self._conversation = conversation
        self._answer, self._output = answer, output
        self._drop_oldest = drop_oldest

    def run(self) -> int:
        with contextlib.suppress(ImportError):
            import_module("readline")  # line editing and history, where Python has it
        at_terminal = sys.stdin.isatty()
        if at_terminal:
            _say(_HELP)
        code = 0
        while (message := _line("> " if at_terminal else "")).strip():
            try:
                self._turn(message)
            except KeyboardInterrupt:
                if not at_terminal:
                    raise
                print(file=sys.stderr)
            except BrokenPipeError:
                raise
            except Exception as error:
                reason = str(error) if isinstance(error, PacelineError) else _fault(error)
                if isinstance(error, ContextFull) and error.turns and not at_terminal:
                    reason += ", as --drop-oldest does"
                _say(f"paceline: {reason}")
                if self._output.json:
                    print(json.dumps({"error": reason}, ensure_ascii=False), flush=True)
                if not at_terminal:
                    code = error.exit_code if isinstance(error, PacelineError) else 1
        return code

    def _turn(self, message: str) -> None:
        """Answer one message, if it fits the context."""
        conversation, options = self._conversation, self._answer.options()
        try:
            stream = conversation.say(message, **options)
        except ContextFull as full:
            if full.turns is None or not self._may_drop(full, full.turns):
                raise
            conversation.drop_oldest(full.turns)
            stream = conversation.say(message, **options)
        with stream:
            show = step_printer(self._answer, self._output, stream)
            try:
                for step in stream:
                    show(step)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
        if self._output.json:
            print(json.dumps(stream.result.as_dict(), ensure_ascii=False), flush=True)
        else:
            print_end(stream.result, self._output)

    def _may_drop(self, full: ContextFull, count: int) -> bool:
        """Whether the oldest turns may be dropped: by the option, or by the user's answer."""
        turns = f"the oldest {count} of {self._conversation.turns} turns"
        if self._drop_oldest:
            if not self._output.quiet:
                _say(f"[the context is full: {_counts(full)}; dropped {turns}]")
            return True
        if not sys.stdin.isatty():
            return False
        _say(f"The context is full: {_counts(full)}, with the new message.")
        while True:
            answer = _line(f"Drop {turns} and go on? [y]es, [n]o, [s]ave first: ").strip().lower()
            if answer in ("y", "yes"):
                return True
            if answer in ("s", "save"):
                _save(self._conversation)
            elif answer in ("", "n", "no"):
                _say("Nothing was dropped, and the message was not sent.")
                return False


def _save(conversation: "Conversation") -> None:
    """Write the messages to a file that the user names, as a JSON list."""
    from paceline.storage.files import write_bytes

    name = _line("File: ").strip()
    if not name:
        return
    try:
        path = Path(name).expanduser()
        if path.exists():
            _say(f"{path} exists already; choose another name.")
            return
        text = json.dumps(conversation.messages, ensure_ascii=False, indent=1)
        write_bytes(path, text.encode("utf-8", "surrogatepass"))
    except (OSError, RuntimeError, ValueError) as error:
        _say(f"cannot write {name}: {error}")
    else:
        _say(f"{len(conversation.messages)} messages are in {path}.")


def _counts(full: ContextFull) -> str:
    return f"{full.tokens} of {full.context} tokens"


def _line(prompt: str) -> str:
    """The next line of the input, without its end; empty at the end of the input."""
    if prompt and not sys.stdout.isatty():  # answers go there, and nothing else
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    try:
        return input(prompt)
    except EOFError:
        return ""


def _fault(error: Exception) -> str:
    return f"this turn failed: {' '.join(f'{type(error).__name__}: {error}'.split())}"


def _say(text: str) -> None:
    print(text, file=sys.stderr)
