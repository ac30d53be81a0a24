"""`paceline verify`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from paceline.cli import declare, numbers
from paceline.cli.console import check_writable, load_model, print_report, progress_of
from paceline.cli.options import (
    OF_MODEL,
    ApiKey,
    MaxTokens,
    ModelOptions,
    Output,
    ResultFile,
    Served,
    Suite,
    command,
    group,
)

app = group()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationArguments:
    """What is checked."""

    quick: Annotated[
        bool, Option("--quick", help="a part that fits into a minute, and what all would take")
    ] = False
    drafters: Annotated[
        list[str],
        declare.drafters(help="check this one; may be repeated; default: all there are"),
    ]
    suite: Suite = None
    max_tokens: MaxTokens = 64
    output: ResultFile = None

    def __post_init__(self) -> None:
        check_writable(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteArguments:
    """A server to check instead of a model here."""

    url: Annotated[
        str | None,
        Option(
            metavar="BASE",
            help="check a server instead: do its texts change in company, or with speculation?",
        ),
    ] = None
    served_model: Served = None
    api_key: ApiKey = None
    plain_url: Annotated[
        str | None,
        Option(
            metavar="BASE",
            help="with --url: a second server of the same model, started without speculation",
        ),
    ] = None
    clients: Annotated[
        int, Option(parser=numbers.CLIENTS, help="with --url: requests at once, up to 1024")
    ] = 8
    rounds: Annotated[int, declare.count(help="with --url: repetitions")] = 2


@command(
    app,
    first=("model", "quick", "drafters", "url", "json"),
    examples=(
        "paceline verify --quick  # in a minute",
        "paceline verify --url http://127.0.0.1:8000/v1  # any OpenAI-compatible server",
    ),
    needs={"url": ("served_model", "api_key", "plain_url", "clients", "rounds")},
    bars={"url": {"drafters", *OF_MODEL}},
)
def verify(
    *,
    verification: VerificationArguments,
    server: RemoteArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Check that drafts change no token, here or of a server."""
    if server.url is not None:
        from paceline.client import Access
        from paceline.verify.server import verify_server

        outcome = verify_server(
            server.url,
            Access(server.served_model, server.api_key, server.plain_url),
            progress_of(output),
            suite=verification.suite,
            max_tokens=verification.max_tokens,
            clients=server.clients,
            rounds=server.rounds,
            quick=verification.quick,
        )
        return print_report(outcome, output, verification.output)
    from paceline.verify.command import verify as run

    report = run(
        lambda: load_model(model, output, drafters=verification.drafters),
        progress_of(output),
        max_tokens=verification.max_tokens,
        quick=verification.quick,
        drafters=verification.drafters,
        suite=verification.suite,
    )
    return print_report(report, output, verification.output)
