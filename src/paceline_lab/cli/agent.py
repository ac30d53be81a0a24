"""`paceline bench agent`: recorded sessions by plain decoding, drafters and a server."""

from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from paceline.cli.console import check_writable, load_model, print_report
from paceline.cli.options import ModelOptions, Output, ResultFile, command
from paceline.storage.report import Report
from paceline_lab.cli.options import Drafters, Rounds, measuring
from paceline_lab.client import Access


@command(
    examples=(
        "paceline bench agent --output agent.json",
        "paceline bench agent session.jsonl --drafter auto --drafter suffix",
        "paceline bench agent --url http://127.0.0.1:8080/v1",
    ),
)
def agent(
    *,
    session: Annotated[
        Path | None,
        Argument(
            parser=Path,
            metavar="[FILE]",
            help="one JSON object with role and content per line; default: a coding session and "
            "one with documents",
        ),
    ] = None,
    drafter: Drafters,
    rounds: Rounds = 1,
    url: Annotated[
        str | None,
        Option(metavar="BASE", help="also send the turns to this server, which has the same model"),
    ] = None,
    access: Access,
    result: ResultFile = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Replay a recorded agent session.

    Turns that do not fit the context are left out.
    """
    from paceline_lab.agent.replay import (
        load_sessions,
        measure_session,
        replay_here,
        replay_there,
        tables_of,
        totals_of,
    )
    from paceline_lab.bench.ab_test import about, contender_options, max_context, options_facts
    from paceline_lab.bench.journal import open_journal
    from paceline_lab.bench.record import Record, Row
    from paceline_lab.bench.turns import Skipped
    from paceline_lab.client import connect

    check_writable(result)
    sessions, progress = load_sessions(session), measuring(output)
    options = contender_options(drafter, (), ())
    server = None if url is None else [*connect(url, access).values()][-1]
    loaded = load_model(model, output, drafters=drafter)
    loaded.measured_costs()
    head = Record(
        "agent",
        rows=[],
        settings={
            "sessions": [session.name for session in sessions],
            "contenders": options_facts(options),
            **({} if server is None else {"server": server.name, "served": server.model}),
            "rounds": rounds,
        },
        suite_sha256=sha256("".join(s.sha256 for s in sessions).encode()).hexdigest(),
        **about(loaded),
    )
    rows: list[Row] = []
    skipped: list[Skipped] = []
    room = max_context(loaded)
    with open_journal(result, head, progress) as measured:
        for number, one in enumerate(sessions, start=1):
            turns = []
            for turn in one.turns(loaded):
                if (size := len(turn.prompt) + len(turn.answer)) > room:
                    skipped.append(Skipped(turn.name, size, room))
                else:
                    turns.append(turn)
            replays = {
                name: partial(replay_here, loaded, turns, settings)
                for name, settings in options.items()
            }
            if server is not None:
                replays[server.name] = partial(replay_there, server, turns)
            call = partial(measure_session, one.name, turns, replays, rounds)
            rows += measured(one.name, call, f"{number}/{len(sessions)}")
    failed = [f"{row.case} ({row.contender}): {e}" for row in rows if (e := row.facts.get("error"))]
    passed = bool(rows) and not failed and all(row.facts.get("same_tokens", True) for row in rows)
    names = dict.fromkeys(row.kind for row in rows)
    totals = {name: totals_of([row for row in rows if row.kind == name]) for name in names}
    skips = {"skipped": [turn._asdict() for turn in skipped], "failed": failed}
    record = replace(head, rows=rows, summary={"totals": totals, **skips})
    tables = [table for name in names for table in tables_of(name, rows, totals[name])]
    text = "\n".join([*map(str, skipped), *failed])
    report = Report(record.as_dict(), passed, text, tables)
    return print_report(report, output, result, journal=True)
