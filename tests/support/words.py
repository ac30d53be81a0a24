"""The commands of the command line, and what they read from words, without running them."""

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from paceline.cli.app import app


def commands(made: Any = None, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command's words, and the command."""
    made = made or get_command(app)
    if not isinstance(made, TyperGroup):
        yield name, made
        for form in getattr(made, "forms", list)():
            yield (*name, "--to", form), made.form(form)
        return
    for word in made.list_commands(None):  # type: ignore[arg-type]
        yield from commands(made.get_command(None, word), (*name, word))  # type: ignore[arg-type]


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Values of a command's parameters. Raises what typer raises for wrong words."""
    made, left, name = get_command(app), [*words], "paceline"
    while isinstance(made, TyperGroup) and left and not left[0].startswith("-"):
        name = left.pop(0)
        made = made.get_command(None, name)  # type: ignore[arg-type]
        assert made is not None, f"no command {name}"
    return dict(made.make_context(name, left).params)
