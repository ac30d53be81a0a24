"""`paceline bench serve`."""

from dataclasses import asdict, dataclass
from typing import Annotated

from typer import Option

from paceline.cli import declare, numbers
from paceline.cli.console import check_writable, print_report, progress_of
from paceline.cli.options import ApiKey, MaxTokens, Output, ResultFile, Suite, command, group
from paceline_lab.cli.options import Kinds

app = group()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadArguments:
    """A server and its requests, on the command line."""

    url: Annotated[str, Option(help="base URL of the server")] = "http://127.0.0.1:8000/v1"
    model: Annotated[str | None, Option(help="default: the server's first")] = None
    api_key: ApiKey = None
    clients: Annotated[
        list[int],
        declare.several(
            parser=numbers.COUNT, help="clients at once; may be repeated; default: 1, 8"
        ),
    ]
    rates: Annotated[
        list[float],
        declare.several("--rate", parser=numbers.RATE, help="requests/s; may be repeated"),
    ]
    requests: Annotated[int, declare.count(help="requests of each load")] = 32
    kinds: Kinds
    extra: Annotated[str, Option(metavar="JSON", help="more fields of every request")] = "{}"
    suite: Suite = None
    max_tokens: MaxTokens = 128


@command(
    app,
    examples=(
        "paceline bench serve --clients 1 --clients 8",
        "paceline bench serve --url http://127.0.0.1:9000/v1 --rate 2 --output load.json",
    ),
)
def serve(*, load: LoadArguments, result: ResultFile = None, output: Output) -> int:
    """Load a server: paceline's, or another OpenAI-compatible one."""
    from paceline_lab.load import bench_serve

    check_writable(result)
    return print_report(bench_serve(progress_of(output), **asdict(load)), output, result)
