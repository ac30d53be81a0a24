"""`paceline bench peers`."""

from dataclasses import asdict
from typing import Annotated

from typer import Option

from paceline.cli import declare
from paceline.cli.console import load_model, print_report
from paceline.cli.options import ApiKey, ModelOptions, Output, Served, command, group
from paceline_lab.cli.options import Limit, MeasurementArguments, measuring

app = group()


@command(
    app,
    examples=(
        "paceline bench peers --peer llama-server --rounds 2",
        "paceline bench peers --llama-server ./llama-server --limit 60",
        "paceline bench peers --peer http://127.0.0.1:8080/v1 --output peers.json",
    ),
)
def peers(
    *,
    peer: Annotated[
        list[str],
        declare.several(
            metavar="NAME",
            help="llama-server, which is the default, or the base URL of a server; may be repeated",
        ),
    ],
    llama_server: Annotated[
        str | None,
        Option(metavar="PATH", help="llama.cpp's server, a peer then; default: that on PATH"),
    ] = None,
    limit: Limit = None,
    served_model: Served = None,
    api_key: ApiKey = None,
    measurement: MeasurementArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Compare with other runtimes, and with servers."""
    from paceline.client import Access
    from paceline_lab.peers.command import bench_peers

    result = bench_peers(
        lambda: load_model(model, output),
        **asdict(measurement),
        limit=limit,
        peers=peer,
        llama_server=llama_server,
        access=Access(served_model, api_key),
        threads=model.threads,
        progress=measuring(output),
    )
    return print_report(result, output, measurement.output)
