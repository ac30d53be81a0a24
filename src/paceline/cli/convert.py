"""`paceline convert`."""

import shlex
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from paceline.cli.console import print_value, progress_of
from paceline.cli.groups import added_names, load_command
from paceline.cli.options import Command, Output, command, group
from paceline.errors import InvalidRequest

app = group()

_OPENVINO = "openvino"
_added_forms = partial(added_names, "convert.")
_FORMS = ", ".join((_OPENVINO, *_added_forms()))

Folder = Annotated[
    Path | None,
    Option("--output", parser=Path, metavar="FOLDER", help="a folder to make; default: the cache"),
]


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
        "paceline convert Qwen/Qwen3-0.6B --weights int4",
        "paceline convert ./checkpoint --weights int8",
    ),
)
def convert(
    *,
    source: Annotated[str, Argument(help="a folder, a hub name (owner/name)")],
    to: Annotated[
        str,
        Option(metavar="FORM", help=f"{_FORMS}; options of another: convert --to FORM --help"),
    ] = _OPENVINO,
    weights: Literal["int8", "int4", "f16"] = "int8",
    folder: Folder = None,
    output: Output,
) -> int:
    """Convert a model to another form, once."""
    if to != _OPENVINO:
        raise InvalidRequest(f"--to is {to!r}; expected {_FORMS}")
    from paceline.models import convert as export

    files = export(source, weights, output=folder, progress=progress_of(output))
    facts = {"name": files.name, "folder": str(files.folder)}
    name = shlex.quote(str(folder) if folder is not None else f"{source}@{weights}")
    print_value(output, facts, f"{source} is ready in {files.folder}; use it with --model {name}")
    return 0
