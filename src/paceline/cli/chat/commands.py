"""The commands of a chat: a word that begins with a slash, at the beginning of a message."""

import difflib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from paceline.cli.chat import clipboard, settings
from paceline.cli.chat.session import Session
from paceline.cli.console import say
from paceline.errors import InvalidRequest

_WORD = re.compile(r"/[a-z?]+(?=\s|$)", re.IGNORECASE)

_KEYS = """\
\"\"\" before and after   a message of several lines; Alt-Enter begins one, too
up, Ctrl-R             an earlier message
Ctrl-X Ctrl-E          write the message in your editor ($EDITOR)
Ctrl-C                 stop an answer, or clear the line; twice ends the chat, as Ctrl-D does"""


class EndOfChat(Exception):
    """The user ends the chat."""


class Command(NamedTuple):
    """A command, and what /help says of it."""

    argument: str
    about: str
    run: Callable[[Session, str], None]


def run_command(session: Session, message: str) -> bool:
    """Run the command that a message is; returns False for one that is none.

    Raises InvalidRequest for a wrong command, PacelineError if it fails, EndOfChat at the end.
    """
    word = _WORD.match(message)
    if word is None:
        return False
    name, argument = word[0].lower(), message[word.end() :].strip()
    command = COMMANDS.get(_OTHER_NAMES.get(name, name))
    if command is None:
        if "\n" in message:  # a text that was pasted
            return False
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidRequest(
            f"there is no command {name}; {hint}/help lists them, a space before it sends it"
        )
    if argument and not command.argument:
        raise InvalidRequest(f"{name} takes nothing after it; a space before it sends it")
    if not argument and command.argument and not command.argument.startswith("["):
        raise InvalidRequest(f"{name} needs more: {name} {command.argument}")
    command.run(session, argument)
    return True


def _help(session: Session, argument: str) -> None:
    for name, command in COMMANDS.items():
        say(f"{f'{name} {command.argument}':<23}{command.about}")
    say(_KEYS)


def _system(session: Session, argument: str) -> None:
    if not argument:
        say(session.system or "There is no system message.")
        return
    text = argument.strip('"')
    session.set_system(text)
    say("The system message is set." if text else "There is no system message now.")


def _set(session: Session, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if value.strip():
        session.options = settings.changed(session.options, name, value.strip())
        say(f"{name} is {value.strip()} from the next answer on.")
        return
    names = [name.replace("-", "_")] if name else settings.NAMES
    for known in names:
        if known not in settings.NAMES:
            settings.changed({}, known, settings.DEFAULT)  # names what is wrong
        if name or session.options.get(known) is not None:
            say(f"{known}: {session.options.get(known, settings.DEFAULT)}")
    if not name:
        say(f"To set: {', '.join(settings.NAMES)}; `{settings.DEFAULT}` leaves one out again.")


def _model(session: Session, argument: str) -> None:
    if argument:
        session.change_model(argument)
        say(f"{session.model} answers from now on; the conversation is the same.")
    else:
        say(session.model)


def _save(session: Session, argument: str) -> None:
    if argument or session.saved_as:
        say(f"{len(session.messages)} messages are in {session.save(argument)}.")
    else:
        session.ask_and_save()


def _load(session: Session, argument: str) -> None:
    session.restore(argument)
    say(f"{len(session.messages)} messages are read; /undo goes back.")


def _clear(session: Session, argument: str) -> None:
    session.clear()
    say("A new conversation; /undo goes back.")


def _regen(session: Session, argument: str) -> None:
    session.answer_again()


def _undo(session: Session, argument: str) -> None:
    say(f"Undone: {session.undo()}.")


def _copy(session: Session, argument: str) -> None:
    text = session.last_answer
    if text is None:
        raise InvalidRequest("there is no answer yet")
    say(f"{len(text)} characters are copied {clipboard.copy(text)}.")


def _bye(session: Session, argument: str) -> None:
    raise EndOfChat


COMMANDS: Mapping[str, Command] = {
    "/help": Command("", "this list", _help),
    "/system": Command("[TEXT]", 'show or set the system message; "" removes it', _system),
    "/set": Command("[OPTION VALUE]", "show or set options of answers", _set),
    "/model": Command("[NAME]", "show or change the model; the conversation goes on", _model),
    "/save": Command("[FILE]", "write the conversation", _save),
    "/load": Command("FILE", "go on with a saved conversation", _load),
    "/clear": Command("", "begin a new conversation, with the same system message", _clear),
    "/regen": Command("", "answer the last message again", _regen),
    "/undo": Command("", "undo the last message or command", _undo),
    "/copy": Command("", "copy the last answer", _copy),
    "/bye": Command("", "end the chat", _bye),
}

_OTHER_NAMES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}
