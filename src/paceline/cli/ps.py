"""`paceline ps`: the models that servers on this machine have loaded."""

from typing import Annotated

from typer import Option

from paceline.cli.console import print_status, print_table, print_value
from paceline.cli.options import Output, command
from paceline.cli.servers import registered_urls, served

_DEFAULT = "http://127.0.0.1:8000/v1"
"""Default address of `serve`; another user or a service may have started that server."""


@command(examples=("paceline ps", "paceline ps --url http://127.0.0.1:9000/v1"))
def ps(
    *,
    url: Annotated[
        str | None, Option(metavar="BASE", help="base URL of one server; default: all of yours")
    ] = None,
    output: Output,
) -> int:
    """List running servers and their models."""
    urls = [_DEFAULT, *registered_urls()] if url is None else [url]
    models = [model for base in dict.fromkeys(urls) for model in served(base)]
    if output.json or not models:
        if not (models or output.json or output.quiet):
            where = "on this machine" if url is None else f"at {url}"
            print_status(f"no server listens {where}; `paceline serve` starts one")
        print_value(output, models, "")
        return 0
    fields = ("device", "drafter", "state", "url")
    rows = [[model["id"] or "?", *(model.get(name, "") for name in fields)] for model in models]
    print_table(["model", "device", "drafter", "state", "server"], rows)
    return 0
