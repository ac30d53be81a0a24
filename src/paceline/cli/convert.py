"""`paceline convert`."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

from typer import Argument, Option

from paceline.cli.groups import added_names, load_command
from paceline.cli.options import Command, command, group
from paceline.errors import InvalidRequest

app = group()

_added_forms = partial(added_names, "convert.")
_FORMS = ", ".join(_added_forms())


class Convert(Command):
    """`convert --to FORM` is another command, with options of its own, where a package adds it."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Parse the words, as the command of the form that they name."""
        form = _form_named(args)
        if form in _added_forms():
            return self.form(form).make_context(info_name, args, *rest, **extra)
        return super().make_context(info_name, args, *rest, **extra)

    def forms(self) -> Sequence[str]:
        """Forms that other packages add."""
        return _added_forms()

    def form(self, name: str) -> Any:
        """The command of a form that another package adds."""
        return load_command(f"convert.{name}", "convert")


def _form_named(words: Sequence[str]) -> str:
    """The value of the last --to; empty without."""
    form = ""
    for word, following in pairwise([*words, ""]):
        if word.partition("=")[0] == "--to":
            form = following if word == "--to" else word.removeprefix("--to=")
    return form


@command(
    app,
    kind=Convert,
    examples=(
        "paceline convert Qwen/Qwen3-0.6B --to coreml",
        "paceline convert smollm2-135m --to coreml --gate",
    ),
)
def convert(
    *,
    source: Annotated[str, Argument(help="a folder, a hub name (owner/name)")],
    to: Annotated[
        str, Option(metavar="FORM", help=f"{_FORMS}; its options: convert --to FORM --help")
    ] = "",
) -> int:
    """Convert a model to another form, once."""
    named = f"--to is {to!r}" if to else "--to is missing"
    raise InvalidRequest(
        f"{named}; expected {_FORMS}. Other engines run {source} in its published form: a GGUF "
        "file, or safetensors with --engine mlx"
    )
