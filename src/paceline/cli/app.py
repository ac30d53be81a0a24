"""The command line: finds a command's module, runs it, and turns errors into exit codes.

Answers go to standard output, everything else to standard error. Exit codes: 0 done, 1 a check
failed, 2 the user's mistake, 130 stopped with Ctrl-C.
"""

import errno
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.main import get_command

from paceline import __version__
from paceline.cli.groups import Group
from paceline.cli.interrupt import EXIT, LINE, is_interrupt, stop_by_exception
from paceline.errors import PacelineError, did_you_mean
from paceline.storage.system import BROKEN_PIPE_EXIT

COMMANDS = (
    *("pull", "models", "convert", "generate", "chat", "serve", "bench", "verify", "plan"),
    *("ps", "rm", "forget"),
)
"""Each is the module of the same name in this folder; other packages add more."""

_OTHER_NAMES = {"list": "models", "ls": "models", "remove": "rm", "help": "--help"}  # elsewhere

_UNKNOWN = re.compile("No such command '(.+?)'")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of an output that takes no more, or was closed by the caller."""


class Commands(Group):
    """Imports a command's module when the command is looked up."""

    def prefix(self) -> str:
        """Names of entry points begin with nothing that add a command here."""
        return ""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order of the help."""
        return [*dict.fromkeys((*COMMANDS, *super().list_commands(ctx)))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        command = get_command(import_module(f"paceline.cli.{cmd_name}").app)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> int:
        """Run a command; returns the exit code, after one line about an error."""
        try:
            stop_by_exception()
            code: int = super().invoke(ctx)
            sys.stdout.flush()
        except PacelineError as error:
            print(f"paceline: {error}", file=sys.stderr)
            return error.exit_code
        except OSError as error:
            return _output_failed(error)
        except (KeyboardInterrupt, Exception) as error:
            if not is_interrupt(error):
                raise
            print(LINE, end="", file=sys.stderr)
            return EXIT
        return code


app = typer.Typer(cls=Commands, pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _paceline(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """Run language models here, faster by exact speculation."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal that lacks a letter shows another
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, TextIOWrapper):  # `console.as_unicode` says where a byte is wrong
        sys.stdin.reconfigure(errors="surrogateescape")
    command = get_command(app)
    command.context_settings["help_option_names"] = ["-h", "--help"]
    words = translated(sys.argv[1:] if arguments is None else arguments)
    try:
        code: int = command.main(words, prog_name="paceline", standalone_mode=False)
        sys.stdout.flush()  # of --help and --version
    except OSError as error:
        return _output_failed(error)
    except typer.TyperException as error:
        print(_usage_error(error), file=sys.stderr)
        return 2
    return code


def _open_closed_streams() -> None:
    """Open what the caller has closed: an input that is empty, an output that fails if written."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:  # else `print` writes errors to standard output
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def translated(words: Sequence[str]) -> list[str]:
    """The words of a command line, with our names; without any word, those for help.

    `run MODEL` is a chat with the model, `run MODEL PROMPT` one answer of it.
    """
    if not words:
        return ["--help"]
    name, *rest = words
    if name != "run":
        return [_OTHER_NAMES.get(name, name), *rest]
    if not rest or rest[0].startswith("-"):
        return ["chat", *rest]
    model, *rest = rest
    command = "generate" if rest and not rest[0].startswith("-") else "chat"
    return [command, *rest, "--model", model]


def _output_failed(error: OSError) -> int:
    """The exit code, after one line about an output that cannot be written; raises other errors."""
    closed = isinstance(error, BrokenPipeError)  # by its reader, who has seen enough
    if not closed and (error.filename is not None or error.errno not in _FULL):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is in the buffer
    if closed:
        return BROKEN_PIPE_EXIT
    print(f"paceline: cannot write the output: {error.strerror}", file=sys.stderr)
    return PacelineError.exit_code


def _usage_error(error: typer.TyperException) -> str:
    """What is wrong with the words of a command, in one line."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "paceline"
    message = error.format_message()
    hint = ""
    if word := _UNKNOWN.search(message):
        group: Any = context.command if context else None
        hint = did_you_mean(word[1], group.list_commands(context) if group else ())
        message = f"no command is called {word[1]!r}"
    elif hasattr(error, "option_name") and hasattr(error, "possibilities"):
        hint = did_you_mean(error.option_name, error.possibilities or ())
        message = message.partition(" (")[0].replace("No such option:", "no option is called")
    option = getattr(error, "param", None)
    if option is not None and error.message:
        name = option.opts[-1] if option.param_type_name == "option" else option.name
        message = f"argument {name}: {error.message.removeprefix('Value error, ')}"
    return f"{path}: {' '.join(message.split()).rstrip('.')}; {hint}see {path} --help"
