"""The command line: finds a command's module, runs it, and turns errors into exit codes.

Answers go to standard output, everything else to standard error. Exit codes: 0 success, 1 a check
failed, 2 the user's mistake, 130 stopped with Ctrl-C.
"""

import errno
import json
import os
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.main import get_command

from paceline import __version__
from paceline.cli.groups import Group
from paceline.cli.habits import habits
from paceline.cli.interrupt import EXIT, LINE, is_interrupt, stop_by_exception
from paceline.errors import PacelineError, did_you_mean
from paceline.storage.text import visible
from paceline.system.machine import BROKEN_PIPE_EXIT, direct_hosts

COMMANDS = (
    *("pull", "models", "generate", "chat", "batch", "decide", "serve", "launch", "bench"),
    *("verify", "plan", "show", "ps", "rm", "forget"),
)
"""Commands, each the module of the same name in this folder; other packages add more."""

_UNKNOWN = re.compile("No such command '(.+?)'")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of an output that accepts no more data, or was closed by the caller."""


class Commands(Group):
    modules = COMMANDS

    def invoke(self, ctx: Any) -> int:
        """Run a command; return the exit code, after a line about an output error or Ctrl-C."""
        try:
            stop_by_exception()
            code: int = super().invoke(ctx)
            sys.stdout.flush()
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
    """Run language models on this machine, faster, with exact speculation."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    _open_closed_streams()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # files and pipes are UTF-8, whatever the locale is
            # `console.as_unicode` reports the position of an invalid byte.
            errors = "surrogateescape" if stream is sys.stdin else "backslashreplace"
            encoding = None if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors=errors, newline=None)
    if any(name.lower().endswith("_proxy") for name in os.environ):
        # The Hugging Face client and pip also reach loopback addresses without a proxy.
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = direct_hosts()
    command = get_command(app)
    command.context_settings["help_option_names"] = ["-h", "--help"]
    words = translated(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            code: int = command.main(words, prog_name="paceline", standalone_mode=False)
            sys.stdout.flush()  # of --help and --version
        except OSError as error:
            code = _output_failed(error)
    except (PacelineError, typer.TyperException) as error:
        if isinstance(error, PacelineError):
            path, message, code = "paceline", str(error), error.exit_code
        else:
            (path, message), code = _usage_error(error), PacelineError.exit_code
        if "--json" in words[: words.index("--") if "--" in words else None]:
            value = {"message": message, "type": type(error).__name__, "exit_code": code}
            print(json.dumps({"error": value}), file=sys.stderr)
        else:
            print(visible(f"{path}: {message}", line=True), file=sys.stderr)
    return code


def _open_closed_streams() -> None:
    """Open standard streams that the caller closed: an empty input, an output that fails."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:  # else `print` writes errors to standard output
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def translated(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with paceline's names.

    `run MODEL` is a chat with the model, `run MODEL PROMPT` a single answer.
    """
    match [*words]:
        case ["run", model, prompt, *rest] if "-" not in (model[:1], prompt[:1]):
            return ["generate", prompt, *rest, "--model", model]
        case ["run", *rest]:
            return ["chat", *rest]
        case ["help", _, *_]:
            return [*translated(words[1:]), "--help"]
        case [name, *rest]:
            return [habits("commands").get(name, name), *rest]
    return []


def _output_failed(error: OSError) -> int:
    """Return the exit code for a reader that left. Raises other errors."""
    closed = isinstance(error, BrokenPipeError)  # by its reader, which stopped early
    if not closed and (error.filename is not None or error.errno not in _FULL):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for text in the buffer
    if closed:
        return BROKEN_PIPE_EXIT
    raise PacelineError(f"cannot write the output: {error.strerror}") from error


def _usage_error(error: typer.TyperException) -> tuple[str, str]:
    """Return the failing command, and its error message on one line."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "paceline"
    message = error.format_message()
    hint = ""
    if word := _UNKNOWN.search(message):
        group: Any = context.command if context else None
        hint = did_you_mean(word[1], group.list_commands(context) if group else ())
        if answer := habits("answers").get(word[1]):
            hint = f"{answer}; "
        if " " in word[1]:
            hint = "a prompt follows its command, as in paceline generate 'Hello'; "
        message = f"no command is called {word[1]!r}"
    elif hasattr(error, "option_name") and hasattr(error, "possibilities"):
        hint = did_you_mean(error.option_name, error.possibilities or ())
        if path == "paceline" and not hint:
            hint = "options follow a command, as in paceline generate -m NAME 'Hello'; "
        elif path == "paceline generate" and not hint:
            hint = "a prompt that begins with a dash follows --, as in paceline generate -- '-5'; "
        message = message.partition(" (")[0].replace("No such option:", "no option is called")
    elif "extra argument" in message and path in ("paceline generate", "paceline chat"):
        hint = "a prompt is one argument, in quotes, of paceline generate; "
    option = getattr(error, "param", None)
    if option is not None and error.message:
        name = option.opts[-1] if option.param_type_name == "option" else option.name
        message = f"argument {name}: {error.message.removeprefix('Value error, ')}"
    return path, f"{' '.join(message.split()).rstrip('.')}; {hint}see {path} --help"
