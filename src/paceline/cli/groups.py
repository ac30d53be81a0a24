"""Groups of commands, extended by other packages through entry points.

Commands are imported when they are named or listed.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from typer import Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from paceline import plugins


class Group(TyperGroup):
    """A group of its commands and those of other packages: `bench.sweep` in the group `bench`."""

    modules: Sequence[str] = ()
    """Commands in modules of their names in this folder."""

    def list_commands(self, ctx: Any) -> list[str]:
        prefix, names = self._prefix(), plugins.names(plugins.COMMANDS)
        rests = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        rests = (rest for rest in rests if "." not in rest)
        return [*dict.fromkeys((*self.modules, *self.commands, *rests))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.modules:
            module = import_module(f"paceline.cli.{cmd_name}")
            return _named(getattr(module, cmd_name, module).app, cmd_name)
        if cmd_name in self.commands or cmd_name not in self.list_commands(ctx):
            return self.commands.get(cmd_name)
        return load_command(f"{self._prefix()}{cmd_name}", cmd_name)

    def _prefix(self) -> str:
        return f"{self.name}." if self.name else ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; without any, show the help."""
        return super().parse_args(ctx, args or ["--help"] * (not ctx.resilient_parsing))


def load_command(entry: str, name: str) -> Any:
    """Return an entry point's command, as `name`; one that cannot be imported is still listed."""
    try:
        app = plugins.load(plugins.COMMANDS, entry)
        app = getattr(app, "app", app)  # for a function that `command` decorates
        if not isinstance(app, Typer):
            raise plugins.PluginError(f"{entry!r} is {app!r}; expected a Typer app")  # noqa: TRY301
    except plugins.PluginError as error:
        return _unavailable(name, error)
    return _named(app, name)


def _named(app: Typer, name: str) -> Any:
    command = get_command(app)
    command.name = name
    return command


def _unavailable(name: str, error: plugins.PluginError) -> TyperCommand:
    """Return a command that raises `error`, whatever its words."""

    def fail() -> None:
        raise error

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    about = f"(cannot be imported) {error}"
    return TyperCommand(
        name, callback=fail, help=about, add_help_option=False, context_settings=settings
    )
