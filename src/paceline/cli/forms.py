"""Commands that an option turns into other ones, which packages add by entry point.

`convert --to coreml` is the entry point `convert.coreml`, `verify --url BASE` is `verify.url`.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from paceline.cli.groups import added_names, load_command
from paceline.cli.options import Command


class WithForms(Command):
    """A command with other forms: commands with options of their own."""

    choice = ""
    """Words that choose a form, with {} for its name."""

    def forms(self) -> Mapping[str, str]:
        """Return the words that choose a form -> its name."""
        return {self.choice.format(name): name for name in added_names(f"{self.name}.")}

    def form(self, choice: str) -> Any:
        """Return the command that some words choose."""
        return load_command(f"{self.name}.{self.forms()[choice]}", str(self.name))

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Parse the words, as the form that they choose."""
        for choice in self.forms():
            if _is_chosen(choice, args):
                return self.form(choice).make_context(info_name, args, *rest, **extra)
        return super().make_context(info_name, args, *rest, **extra)


def _is_chosen(choice: str, words: Sequence[str]) -> bool:
    """Return whether an option is given, with the value that `choice` has, if it has one."""
    option, _, value = choice.partition(" ")
    given = None
    for word, following in pairwise([*words, ""]):
        if word.partition("=")[0] == option:
            given = following if word == option else word.removeprefix(f"{option}=")
    return given is not None and value in ("", given)
