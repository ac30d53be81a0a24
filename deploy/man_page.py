"""Write the man page paceline.1 in this folder, from the help of the commands themselves.

The wheel installs it as share/man/man1/paceline.1: `man paceline` finds it where that folder is in
the path of man, as in a virtual environment that is active.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from paceline import __version__
from paceline.cli.app import app
from paceline.server.settings import KEY_VARIABLE

PAGE = Path(__file__).with_name("paceline.1")
_NAME = "paceline \\- run language models locally, with exact speculative decoding"
_EXIT = (
    ("0", "done"),
    ("1", "a check failed"),
    ("2", "an invalid option, file or input"),
    ("130", "Ctrl-C"),
)
_ENVIRONMENT = (
    ("PACELINE_CACHE", "folder for models and measurements; default: the user's cache folder"),
    ("PACELINE_MODEL", "name of the model where none is given"),
    ("PACELINE_KEEP", "1: generate and chat save answers and typed messages, as with --keep"),
    (KEY_VARIABLE, "API key for serve, and for commands that use a server"),
    ("HF_TOKEN, HF_ENDPOINT, HF_HOME", "as in Hugging Face's tools"),
)


def man_page() -> str:
    """The page, in roff's man macros."""
    lines = [
        f'.TH PACELINE 1 "" "paceline {__version__}" "User Commands"',
        *(".SH NAME", _NAME),
        *(".SH SYNOPSIS", ".B paceline", ".I command", ".RI [ options ]"),
        *(".SH COMMANDS", *_group(get_command(app), None, "paceline")),
        *(".SH EXIT STATUS", *_terms(_EXIT)),
        *(".SH ENVIRONMENT", *_terms(_ENVIRONMENT)),
        *(".SH SEE ALSO", "The guide, in the folder docs of the source."),
    ]
    return "\n".join(lines) + "\n"


def _group(command: Any, parent: Any, path: str) -> Iterator[str]:
    """The commands of a group, and of the groups in it."""
    name = path.rpartition(" ")[2]
    with command.make_context(name, [], parent=parent, resilient_parsing=True) as this:
        if not hasattr(command, "list_commands"):
            yield from _command(command, this, path)
            for choice in getattr(command, "forms", ()):
                yield from _group(command.form(choice), parent, f"{path} {choice}")
            return
        for each in command.list_commands(this):
            yield from _group(command.get_command(this, each), this, f"{path} {each}")


def _command(command: Any, context: Any, path: str) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    yield f".SS {_roff(f'{path} {usage}')}"
    yield _roff(" ".join((command.help or "").split()))
    records = [
        record
        for parameter in command.get_params(context)
        if parameter.name != "help" and (record := parameter.get_help_record(context)) is not None
    ]
    yield from _terms(records)


def _terms(records: Any) -> Iterator[str]:
    for name, text in records:
        yield from (".TP", f".B {_roff(name)}", _roff(" ".join(text.split())))


def _roff(text: str) -> str:
    """Text that roff shows as it is."""
    safe = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + safe if safe.startswith((".", "'")) else safe


if __name__ == "__main__":
    PAGE.write_text(man_page(), encoding="utf-8")
