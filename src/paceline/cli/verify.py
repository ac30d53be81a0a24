"""`paceline verify`."""

from typing import Annotated

from typer import Option

from paceline.cli import declare
from paceline.cli.console import check_writable, load_model, print_report, progress_of
from paceline.cli.options import (
    ApiKey,
    MaxTokens,
    ModelOptions,
    Output,
    ResultFile,
    Suite,
    command,
    group,
)
from paceline.errors import InvalidRequest

app = group()


@command(
    app,
    first=("model", "quick", "whole", "drafter", "url", "json"),
    examples=(
        "paceline verify --quick  # in a minute",
        "paceline verify --url http://127.0.0.1:8000/v1  # any OpenAI-compatible server",
    ),
)
def verify(
    *,
    whole: Annotated[
        bool, Option("--whole", help="every combination, not only a part that covers every pair")
    ] = False,
    quick: Annotated[
        bool, Option("--quick", help="a part that fits into a minute, and what all would take")
    ] = False,
    drafter: Annotated[
        list[str], declare.several(help="check this one; may be repeated; default: all there are")
    ],
    suite: Suite = None,
    max_tokens: MaxTokens = 64,
    url: Annotated[
        str | None,
        Option(
            metavar="BASE",
            help="check a server instead: do its texts change in company, or with speculation?",
        ),
    ] = None,
    served_model: Annotated[
        str | None, Option(metavar="NAME", help="with --url: its model; default: its first")
    ] = None,
    api_key: ApiKey = None,
    plain: Annotated[
        str | None,
        Option(metavar="JSON", help="with --url: fields of a request without speculation"),
    ] = None,
    speculation: Annotated[
        str | None, Option(metavar="JSON", help="with --url: fields of a request with speculation")
    ] = None,
    plain_url: Annotated[
        str | None,
        Option(
            metavar="BASE",
            help="with --url: a second server of the same model, started without speculation",
        ),
    ] = None,
    clients: Annotated[int, declare.count(help="with --url: requests at once")] = 8,
    rounds: Annotated[int, declare.count(help="with --url: repetitions")] = 2,
    result: ResultFile = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Check that drafts change no token, on this machine or of a server."""
    check_writable(result)
    if quick and whole:
        raise InvalidRequest("--quick is a part of what is compared and --whole all; leave out one")
    if url is not None:
        if drafter or whole or quick:
            raise InvalidRequest(
                "--drafter, --whole and --quick are of a model here; leave out --url"
            )
        from paceline.tools.bench.peers.server import Access
        from paceline.tools.bench.verify.server import verify_server

        outcome = verify_server(
            url=url,
            access=Access(served_model, api_key, plain, speculation, plain_url),
            suite=suite,
            max_tokens=max_tokens,
            clients=clients,
            rounds=rounds,
            progress=progress_of(output),
        )
        return print_report(outcome, output, result)
    if plain_url is not None:
        raise InvalidRequest("--plain-url is the second of two servers; give the first with --url")
    from paceline.tools.bench.verify.command import verify as run

    report = run(
        lambda: load_model(model, output, drafters=drafter),
        suite=suite,
        max_tokens=max_tokens,
        whole=whole,
        quick=quick,
        drafters=drafter,
        output=result,
        progress=progress_of(output),
    )
    return print_report(report, output, result)
