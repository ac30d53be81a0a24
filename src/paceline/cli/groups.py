"""Groups of commands to which other packages add commands, and commands to which they add forms.

They are found by entry point, and imported when they are named or listed.
"""

from typing import Any

from typer import Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from paceline import plugins


def added_names(prefix: str) -> list[str]:
    """Names that other packages add: `sweep` with the prefix `bench.` for `bench.sweep`."""
    names = plugins.names(plugins.COMMANDS)
    rests = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return [rest for rest in rests if "." not in rest]


def load_command(entry: str, name: str) -> Any:
    """The command of an entry point, as `name`; one that cannot be imported is still listed."""
    try:
        app = plugins.load(plugins.COMMANDS, entry)
    except plugins.PluginError as error:
        return Unavailable(name, error)
    if not isinstance(app, Typer):
        return Unavailable(name, plugins.PluginError(f"{entry!r} is {app!r}; expected a Typer app"))
    command = get_command(app)
    command.name = name
    return command


class Unavailable(TyperCommand):
    """A command that cannot be imported."""

    def __init__(self, name: str, error: plugins.PluginError) -> None:
        super().__init__(name, help=f"(cannot be imported) {error}")
        self._error = error

    def make_context(self, *words: Any, resilient_parsing: bool = False, **more: Any) -> Any:
        """Raise the error of the import, except to a shell that completes words."""
        if not resilient_parsing:
            raise self._error
        return super().make_context(*words, resilient_parsing=True, **more)


class Group(TyperGroup):
    """Its own commands, then those that other packages add to it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order of the help."""
        return [*dict.fromkeys((*self.commands, *added_names(self.prefix())))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in added_names(self.prefix()):
            return load_command(f"{self.prefix()}{cmd_name}", cmd_name)
        return self.commands.get(cmd_name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; without any, those for help."""
        return super().parse_args(ctx, args or ["--help"] * (not ctx.resilient_parsing))

    def prefix(self) -> str:
        """What names of entry points begin with that add to this group."""
        return f"{self.name}."
