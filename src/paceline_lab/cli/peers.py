"""`paceline bench peers`."""

from dataclasses import replace
from typing import Annotated

from typer import Option

from paceline.cli import declare
from paceline.cli.console import load_model, print_report, progress_of
from paceline.cli.options import ApiKey, ModelOptions, Output, command, group
from paceline.errors import InvalidRequest
from paceline_lab.cli.options import Limit, MeasurementArguments

app = group()


@command(
    app,
    examples=(
        "paceline bench peers --peer llama-cpp-python --rounds 2",
        "paceline bench peers --llama-server ./llama-server --peer openvino --engine llamacpp",
        "paceline bench peers --peer http://127.0.0.1:8080/v1 --output peers.json",
    ),
)
def peers(
    *,
    peer: Annotated[
        list[str],
        declare.several(
            metavar="NAME",
            help="openvino-genai, llama-cpp-python, llama-server, transformers, mlx-lm, the base "
            "URL of a server, or an engine: paceline with it; may be repeated; default: all that "
            "are installed",
        ),
    ],
    llama_server: Annotated[
        str | None,
        Option(metavar="PATH", help="llama.cpp's server, a peer then; default: that on PATH"),
    ] = None,
    limit: Limit = None,
    draft_model: Annotated[
        str | None, Option(metavar="MODEL", help="a smaller model, for mlx-lm to draft with")
    ] = None,
    served_model: Annotated[
        str | None, Option(metavar="NAME", help="model of a server; default: its first")
    ] = None,
    api_key: ApiKey = None,
    plain: Annotated[
        str | None, Option(metavar="JSON", help="fields of a server's request without speculation")
    ] = None,
    speculation: Annotated[
        str | None, Option(metavar="JSON", help="fields of a server's request with speculation")
    ] = None,
    calls: Annotated[
        bool,
        Option(
            "--calls",
            help="instead of answers: calls of 1 to 16 rows, a prompt, start and memory, on the "
            "model's GGUF file",
        ),
    ] = False,
    measurement: MeasurementArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Compare with other runtimes, and with servers."""
    if calls:
        if measurement.suite or measurement.kinds or measurement.per_kind:
            raise InvalidRequest("--calls has no prompts; leave out --suite, --kind and --per-kind")
        if llama_server or limit:
            raise InvalidRequest("--calls has no answers; leave out --llama-server and --limit")
        if model.weights:
            raise InvalidRequest("--calls compares a GGUF file as it is; leave out --weights")
        from paceline_lab.peers.calls.command import bench_calls

        report = bench_calls(
            model.model,
            peers=peer,
            threads=model.threads,
            rounds=measurement.rounds,
            progress=progress_of(output),
        )
        return print_report(report, output, measurement.output)
    from paceline.verify.client import Access
    from paceline_lab.peers.command import bench_peers

    result = bench_peers(
        lambda engine: load_model(replace(model, engine=engine or model.engine), output),
        measurement,
        limit=limit,
        peers=peer,
        llama_server=llama_server,
        access=Access(served_model, api_key, plain, speculation),
        draft=draft_model,
        threads=model.threads,
        progress=progress_of(output),
    )
    return print_report(result, output, measurement.output)
