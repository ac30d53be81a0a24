"""The loop of a chat at a terminal.

Invariant: no message and no command ends the chat, however it fails; that is one line.
"""

import json
import sys

from paceline.cli.chat.commands import EndOfChat, run_command
from paceline.cli.chat.session import Session
from paceline.cli.chat.terminal import HINT, Terminal
from paceline.cli.console import as_unicode, say
from paceline.cli.options import Output
from paceline.errors import PacelineError


def run(session: Session, terminal: Terminal, output: Output) -> None:
    """Answer messages until the user ends the chat."""
    if not output.quiet:
        say(HINT)
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
            reason = str(error) if isinstance(error, PacelineError) else _fault(error)
            say(f"paceline: {reason}")
            if output.json:
                print(json.dumps({"error": reason}, ensure_ascii=False), flush=True)


def _fault(error: Exception) -> str:
    return f"this turn failed: {' '.join(f'{type(error).__name__}: {error}'.split())}"
