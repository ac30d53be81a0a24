"""The commands of the command line, and their parsed arguments, without running them."""

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from paceline.cli.app import app


def commands(
    command: Any = None, name: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command's words, and the command."""
    command = command or get_command(app)
    if not isinstance(command, TyperGroup):
        yield name, command
        for choice in getattr(command, "forms", ()):
            yield name, command.form(choice)
        return
    for word in command.list_commands(None):  # type: ignore[arg-type]
        yield from commands(command.get_command(None, word), (*name, word))  # type: ignore[arg-type]


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Values of a command's parameters. Raises what typer raises for wrong words."""
    command, left, name = get_command(app), [*words], "paceline"
    while isinstance(command, TyperGroup) and left and not left[0].startswith("-"):
        name = left.pop(0)
        command = command.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None, f"no command {name}"
    return dict(command.make_context(name, left).params)
