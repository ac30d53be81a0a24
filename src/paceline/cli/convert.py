"""`paceline convert`."""

from typing import Annotated

from typer import Argument, Option

from paceline.cli.forms import WithForms
from paceline.cli.groups import added_names
from paceline.cli.options import command, group
from paceline.errors import InvalidRequest

app = group()

_FORMS = ", ".join(added_names("convert."))


@command(
    app,
    kind=WithForms,
    choice="--to {}",
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
