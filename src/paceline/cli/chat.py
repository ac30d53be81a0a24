"""The command `chat`: a message a line, from a terminal or a pipe, and an answer to each.

Knows the terminal and one `Conversation`. The rule: no turn ends the chat. What goes wrong with one
is a line on standard error, and the conversation is as it was before it.
"""

import argparse
import contextlib
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.console import print_ending, print_stats, shower
from paceline.errors import ContextFull, PacelineError
from paceline.storage.files import write_bytes

if TYPE_CHECKING:
    from paceline.runtime.conversation import Conversation
    from paceline.runtime.model import Model
    from paceline.runtime.options import Options

_HELP = "An empty line or Ctrl-D ends the chat; Ctrl-C stops an answer."


def chat(options: argparse.Namespace, request: "Options", model: "Model") -> int:
    """Talk until an empty line or the end of the input; returns the exit code.

    At a terminal 0. Of a script's input 2 when a message was not answered, after all of them.
    """
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    with contextlib.closing(model.conversation(system)) as talk:
        return _talk(talk, options, request)


def _talk(talk: "Conversation", options: argparse.Namespace, request: "Options") -> int:
    with contextlib.suppress(ImportError):
        import_module("readline")  # line editing and history, where Python has it
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        _say(_HELP)
    code = 0
    while (message := _line("> " if at_terminal else "")).strip():
        try:
            _turn(message, talk, options, request)
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
            if options.json:
                print(json.dumps({"error": reason}, ensure_ascii=False), flush=True)
            if not at_terminal:
                code = error.exit_code if isinstance(error, PacelineError) else 1
    return code


def _turn(
    message: str, talk: "Conversation", options: argparse.Namespace, request: "Options"
) -> None:
    """Answer one message, when there is room for it."""
    try:
        stream = talk.say(message, **request)
    except ContextFull as full:
        if full.turns is None or not _may_drop(full, talk, options):
            raise
        talk.drop_oldest(full.turns)
        stream = talk.say(message, **request)
    with stream:
        show = shower(options, talk.model, stream)
        try:
            for step in stream:
                show(step)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
    result = stream.result
    if options.json:
        print(json.dumps(result.as_dict(), ensure_ascii=False), flush=True)
        return
    print()
    print_ending(result, options)
    print_stats(result.line(), options)


def _may_drop(full: ContextFull, talk: "Conversation", options: argparse.Namespace) -> bool:
    """Whether the oldest turns may be dropped: by the flag, or by the user's answer."""
    turns = f"the oldest {full.turns} of {talk.turns} turns"
    if options.drop_oldest:
        if not options.quiet:
            _say(f"[the context is full: {_counts(full)}; dropped {turns}]")
        return True
    if not sys.stdin.isatty():
        return False
    _say(f"The context is full: {_counts(full)}, with the new message.")
    while True:
        said = _line(f"Drop {turns} and go on? [y]es, [n]o, [s]ave first: ").strip().lower()
        if said in ("y", "yes"):
            return True
        if said in ("s", "save"):
            _save(talk)
        elif said in ("", "n", "no"):
            _say("Nothing was dropped, and the message was not sent.")
            return False


def _save(talk: "Conversation") -> None:
    """Write the messages to a file that the user names, as a JSON list."""
    name = _line("File: ").strip()
    if not name:
        return
    try:
        path = Path(name).expanduser()
        if path.exists():
            _say(f"{path} exists already; choose another name.")
            return
        text = json.dumps(talk.messages, ensure_ascii=False, indent=1)
        write_bytes(path, text.encode("utf-8", "surrogatepass"))
    except (OSError, RuntimeError, ValueError) as error:
        _say(f"cannot write {name}: {error}")
    else:
        _say(f"{len(talk.messages)} messages are in {path}.")


def _counts(full: ContextFull) -> str:
    return f"{full.tokens} of {full.context} tokens"


def _line(prompt: str) -> str:
    """The next line of the input; nothing at its end. `prompt` is for a terminal."""
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
