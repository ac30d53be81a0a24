"""`paceline chat`: a conversation at a terminal; from a pipe, one message and its answer."""

import contextlib
import sys
from typing import Annotated

from typer import Option

from paceline.cli.answers import AnswerArguments
from paceline.cli.console import read_stdin
from paceline.cli.options import ModelOptions, Output, command
from paceline.errors import InvalidRequest


@command(
    first=("model", "max_tokens", "temperature", "system", "stats", "keep", "quiet"),
    examples=("paceline chat", 'paceline chat -m qwen3-0.6b -s "Answer in one line."'),
)
def chat(
    *,
    drop_oldest: Annotated[
        bool,
        Option(
            "--drop-oldest",
            help="when the context is full, drop the oldest turns without asking",
        ),
    ] = False,
    answer: AnswerArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Chat in the terminal; /help lists the commands.

    Piped input is one message. Of earlier turns, at most the last answer is computed again.
    """
    from paceline.cli.chat.session import Session

    session = Session(model, answer, output, drop_oldest=drop_oldest)
    if not sys.stdin.isatty():
        session.open()
        with contextlib.closing(session):
            message = read_stdin(quiet=output.quiet).rstrip("\n")
            if not message.strip():
                raise InvalidRequest("standard input is empty; expected a message")
            session.turn(message)
        return 0
    from paceline.cli.chat.commands import COMMANDS, run_chat
    from paceline.cli.chat.terminal import Terminal

    terminal = Terminal([*COMMANDS], keep=answer.keep)
    with terminal.holding_keys():
        session.open(terminal)
        with contextlib.closing(session):
            run_chat(session, terminal, output)
    return 0
