"""A chat at a terminal: messages, and commands, which begin with a slash."""

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paceline.cli import declare
from paceline.cli.answers import value_of
from paceline.cli.chat.session import Session
from paceline.cli.chat.terminal import HINT, Terminal
from paceline.cli.console import as_unicode, json_text, print_error, print_status
from paceline.cli.habits import habits
from paceline.cli.options import Output
from paceline.errors import InvalidRequest, PacelineError, did_you_mean
from paceline.options import OPTIONS, STRUCTURES
from paceline.runtime.request import check

_WORD = re.compile(r"/[a-z?]+(?=\s|$)", re.IGNORECASE)

_KEYS = """\
\"\"\" before and after   a message of several lines; Alt-Enter begins one, too
up, Ctrl-R             an earlier message
Ctrl-X Ctrl-E          write the message in your editor ($EDITOR)
Ctrl-C                 stop an answer, or clear the line; twice ends the chat, as Ctrl-D does"""

_OPTIONS = [name for name, option in OPTIONS.items() if option.about.panel]
_DEFAULT = "default"  # the value that resets an option
_SWITCHES = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


class EndOfChat(Exception):
    """Ends the chat at the user's request."""


class ChatCommand(NamedTuple):
    """A command, and its description for /help."""

    argument: str
    about: str
    run: Callable[[Session, str], None]


def run_chat(session: Session, terminal: Terminal, output: Output) -> None:
    """Answer messages until the user ends the chat.

    A failing message or command never ends it; it prints one line.
    """
    if not output.quiet:
        print_status(HINT)
    while (message := terminal.message()) is not None:
        try:
            text = as_unicode(message, "the message")
            if not run_command(session, text):
                session.turn(text)
        except EndOfChat:
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except BrokenPipeError:
            raise
        except Exception as error:
            fault = f"this turn failed: {' '.join(f'{type(error).__name__}: {error}'.split())}"
            reason = str(error) if isinstance(error, PacelineError) else fault
            print_error(reason)
            if output.json:
                print(json_text({"error": reason}), flush=True)


def run_command(session: Session, message: str) -> bool:
    """Run the command in a message; return False if the message is not a command.

    Raises InvalidRequest for a wrong command, PacelineError if it fails, EndOfChat at the end.
    """
    word = _WORD.match(message)
    if word is None:
        return False
    name, argument = word[0].lower(), message[word.end() :].strip()
    command = COMMANDS.get(_OTHER_NAMES.get(name, name))
    if command is None:
        if "\n" in message:  # pasted text
            return False
        raise InvalidRequest(
            f"unknown command {name}; {did_you_mean(name, COMMANDS)}/help lists them, a space "
            "before it sends it"
        )
    if argument and not command.argument:
        raise InvalidRequest(
            f"{name} takes no arguments (to send this as a message, start the line with a space)"
        )
    if not argument and command.argument and not command.argument.startswith("["):
        raise InvalidRequest(f"{name} needs an argument: {name} {command.argument}")
    command.run(session, argument)
    return True


def _help(session: Session, argument: str) -> None:
    for name, command in COMMANDS.items():
        print_status(f"{f'{name} {command.argument}':<23}{command.about}")
    print_status(_KEYS)


def _system(session: Session, argument: str) -> None:
    if not argument:
        print_status(session.system or "No system message is set.")
        return
    text = argument.strip('"')
    session.set_system(text)
    print_status("The system message is set." if text else "The system message is removed.")


def _set(session: Session, argument: str) -> None:
    argument = habits("chat").get(argument, argument)
    name, _, value = argument.removeprefix("parameter ").strip().partition(" ")
    name = name.replace("-", "_")
    name = habits("chat").get(name, name)
    if name == "system":
        _system(session, value)
        return
    if value.strip():
        session.set_options(_changed(session.options, name, value.strip()))
        print_status(f"{name} is {value.strip()} starting with the next answer.")
        return
    names = [name] if name else _OPTIONS
    for known in names:
        if known not in _OPTIONS:
            _changed({}, known, _DEFAULT)  # raises the error for the name
        if name or session.options.get(known) is not None:
            print_status(f"{known}: {session.options.get(known, _DEFAULT)}")
    if not name:
        print_status(f"Options: {', '.join(_OPTIONS)}; `{_DEFAULT}` resets one.")


def _changed(values: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    """Return a copy of options with one set. Raises InvalidRequest if that is not possible."""
    if name not in _OPTIONS:
        raise InvalidRequest(f"unknown option {name!r}; expected {', '.join(_OPTIONS)}")
    replaced = STRUCTURES if name in STRUCTURES else (name,)
    others = {other: value for other, value in values.items() if other not in replaced}
    if text == _DEFAULT:
        return others
    result = {**others, name: _parsed(name, text)}
    check(result)  # type: ignore[arg-type]
    return result


def _parsed(name: str, text: str) -> Any:
    """Return the value of a text. Raises InvalidRequest if it is not a number in the range."""
    if OPTIONS[name].is_switch:
        return _SWITCHES.get(text.lower(), text)  # `check` rejects a text
    parser, is_list = declare.parser_of(name), name in ("stop", "logit_bias")
    try:
        value = parser(text) if parser else text
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}") from error
    return value_of(name, [value] if is_list else value)


def _model(session: Session, argument: str) -> None:
    if argument:
        session.change_model(argument)
    more = " answers the next messages; the conversation is unchanged." if argument else ""
    print_status(f"{session.model}{more}")


def _load(session: Session, argument: str) -> None:
    session.restore(argument)
    print_status(f"{len(session.messages)} messages are read; /undo goes back.")


def _clear(session: Session, argument: str) -> None:
    session.clear()
    print_status("A new conversation; /undo goes back.")


def _undo(session: Session, argument: str) -> None:
    print_status(f"Undone: {session.undo()}.")


def _bye(session: Session, argument: str) -> None:
    raise EndOfChat


COMMANDS: Mapping[str, ChatCommand] = {
    "/help": ChatCommand("", "this list", _help),
    "/system": ChatCommand("[TEXT]", 'show or set the system message; "" removes it', _system),
    "/set": ChatCommand("[OPTION VALUE]", "show or set options of answers", _set),
    "/model": ChatCommand("[NAME]", "show or change the model; the conversation continues", _model),
    "/save": ChatCommand("[FILE]", "write the conversation", Session.save),
    "/load": ChatCommand("FILE", "continue a saved conversation", _load),
    "/clear": ChatCommand("", "begin a new conversation, with the same system message", _clear),
    "/regen": ChatCommand("", "answer the last message again", lambda s, _: s.answer_again()),
    "/undo": ChatCommand("", "take back the last message, /regen, /system, /clear or /load", _undo),
    "/bye": ChatCommand("", "end the chat", _bye),
}

_OTHER_NAMES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}
