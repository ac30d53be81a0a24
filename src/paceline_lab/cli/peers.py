"""`paceline bench peers`: other runtimes and paceline on the same prompts."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli import declare
from paceline.cli.console import load_model, print_report
from paceline.cli.options import ModelOptions, Output, command
from paceline.errors import InvalidRequest
from paceline.storage.report import Report
from paceline_lab.cli.options import MeasurementArguments, measuring
from paceline_lab.client import Access

if TYPE_CHECKING:
    from paceline_lab.peers.measure import Peer


@command(
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
            help="llama-server (the default), or a server's base URL; may be repeated",
        ),
    ],
    llama_server: Annotated[
        str | None,
        Option(
            metavar="PATH",
            help="path of llama.cpp's server, which is then a peer; default: the one on PATH",
        ),
    ] = None,
    access: Access,
    measurement: MeasurementArguments,
    model: ModelOptions,
    output: Output,
) -> int:
    """Compare with other runtimes, and with servers."""
    from paceline_lab.bench.ab_test import about, max_context
    from paceline_lab.bench.journal import open_journal
    from paceline_lab.bench.record import Record
    from paceline_lab.bench.turns import chosen_prompts, measure_turns, needed_context
    from paceline_lab.peers.llama_server import PROGRAM, LlamaServer, server_binary
    from paceline_lab.peers.measure import PacelinePeer, ServerPeer, contenders_of, measure
    from paceline_lab.peers.summary import is_exact, speeds, tables

    rounds, tokens, result = measurement.rounds, measurement.max_tokens, measurement.output
    limit, progress = measurement.limit, measuring(output)
    prompts = chosen_prompts(measurement.suite, limit)
    if llama_server is not None or not peer:
        peer = [*peer, PROGRAM]
    for name in peer:
        if not (name == PROGRAM or _is_url(name)):
            raise InvalidRequest(
                f"no peer is called {name!r}; expected {PROGRAM}, or a server's base URL, as "
                "http://127.0.0.1:8080/v1"
            )
    binary = server_binary(llama_server) if PROGRAM in peer else None
    loaded = load_model(model, output)
    loaded.measured_costs()
    context = min(max_context(loaded), needed_context(prompts.prompts, loaded, tokens))
    opened: list[Peer] = []
    for name in dict.fromkeys(peer):
        with progress.task(f"opening {name}"):
            if binary is None or _is_url(name):
                opened.append(ServerPeer(name, access))
                continue
            threads = model.threads
            opened.append(
                LlamaServer(
                    loaded.files, binary, context, threads=threads, on_message=progress.note
                )
            )
    contenders = contenders_of(PacelinePeer(loaded), opened)
    head = Record(
        "peers",
        rows=[],
        settings={
            "peers": {peer.name: peer.settings for peer in opened},
            "contenders": [contender.name for contender in contenders],
            "rounds": rounds,
            "max_tokens": tokens,
            "prompts": len(prompts.prompts),
            **({} if limit is None else {"limit": limit}),
        },
        suite_sha256=prompts.sha256,
        **about(loaded),
    )
    with open_journal(result, head, progress) as measured:
        rows, skipped = measure_turns(
            prompts.prompts,
            loaded,
            room=context,
            max_tokens=tokens,
            warm_up=lambda turn: [contender.answer(turn, tokens) for contender in contenders],
            measure=lambda turn, place: measure(
                turn, contenders, rounds=rounds, max_tokens=tokens, start=place
            ),
            measured=measured,
            progress=progress,
        )
    skips = {"skipped": [turn._asdict() for turn in skipped]}
    facts = {"same_tokens": is_exact(rows), "speeds": speeds(rows), **skips}
    record = replace(head, rows=rows, summary=facts)
    text = "\n".join(map(str, skipped))
    report = Report(record.as_dict(), is_exact(rows), text, [*tables(rows)])
    return print_report(report, output, result, journal=True)


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))
