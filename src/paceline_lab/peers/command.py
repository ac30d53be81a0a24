"""`bench peers`: other runtimes and paceline on the same prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.errors import MissingExtra
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.storage.json_lines import journal_path
from paceline.storage.report import Report
from paceline.verify.client import Access
from paceline.verify.suite import load_suite
from paceline_lab.arguments import Measurement
from paceline_lab.bench.ab_test import about, max_context
from paceline_lab.bench.journal import open_journal
from paceline_lab.bench.record import PACKAGES, Record, here
from paceline_lab.bench.run.turns import check_names as check_ids
from paceline_lab.peers.llama_server.binary import PROGRAM, server_binary
from paceline_lab.peers.measure import contenders_of
from paceline_lab.peers.paceline_peer import PacelinePeer
from paceline_lab.peers.registry import KNOWN, check_names, open_all
from paceline_lab.peers.summary import PeerRows, is_exact, summary, tables
from paceline_lab.peers.target import TargetModel
from paceline_lab.peers.turns import first_questions, measure_turns, needed_context


def bench_peers(
    load: Callable[[str | None], Model],
    measurement: Measurement,
    *,
    limit: int | None = None,
    peers: Sequence[str],
    llama_server: str | None = None,
    access: Access,
    draft: str | None,
    threads: int | None,
    progress: Progress,
) -> Report:
    """Every peer and paceline, plain and with speculation, on a suite, interleaved.

    Args:
        load: opens the model in an engine; None: in the one that its options name.
        measurement: the suite, and the rest that measurements have in common.
        limit: number of prompts in all, as for `bench run`.
        peers: names, engines, or base URLs of servers; none: the `llama_server`, or without one
            all installed peers.
        llama_server: path of that program; None: the one on PATH.
        access: options of requests to servers.
        draft: a smaller model for peers that use one as drafter.
        threads: CPU threads of every peer.
        progress: shows what is measured.

    Raises:
        InvalidRequest: there is no such peer, server or program, or a value is invalid.
        MissingExtra: a named peer is not installed, or without names none is.
        ModelError: a named peer cannot run this model.
    """
    rounds, max_tokens, output = measurement.rounds, measurement.max_tokens, measurement.output
    prompts = load_suite(measurement.suite).only(measurement.kinds, measurement.per_kind, limit)
    check_ids(prompts.prompts)
    if llama_server is not None and PROGRAM not in peers:
        peers = [*peers, PROGRAM]
    check_names(peers)
    binary = server_binary(llama_server) if PROGRAM in peers else None
    access.check()
    model = load(None)
    model.measure_profile()
    context = min(max_context(model), needed_context(prompts.prompts, model, max_tokens))
    with TargetModel(
        model.files,
        context=context,
        threads=threads,
        draft=draft,
        llama_server=binary,
        progress=progress,
    ) as target:
        opened = open_all(peers, target, access, progress, load)
        if not opened:
            raise MissingExtra(f"no peer is installed; install one of {', '.join(KNOWN)} with pip")
        contenders = contenders_of(PacelinePeer(model), opened)
        engines = [peer.model for peer in opened if isinstance(peer, PacelinePeer)]
        head = Record(
            "peers",
            rows=[],
            settings={
                "peers": {peer.name: peer.settings for peer in opened},
                "contenders": [contender.name for contender in contenders],
                "rounds": rounds,
                "max_tokens": max_tokens,
                "prompts": len(prompts.prompts),
                "kinds": [*measurement.kinds],
                **({} if limit is None else {"limit": limit}),
            },
            suite_sha256=prompts.sha256,
            **about(model),
            **here([*PACKAGES, *dict.fromkeys(name for peer in opened for name in peer.packages)]),
        )
        with open_journal(output, head) as journal:
            questions = first_questions(prompts.prompts, model)
            shortest = min(questions, key=lambda question: len(question.tokens))
            for contender in contenders:  # warm-up
                contender.answer(shortest, max_tokens)
            rows, skipped = measure_turns(
                prompts.prompts,
                contenders,
                model=model,
                room=min(context, *map(max_context, [model, *engines])),
                rounds=rounds,
                max_tokens=max_tokens,
                journal=journal,
                progress=progress,
            )
    peer_rows = PeerRows(rows)
    skips = {"skipped": [turn._asdict() for turn in skipped]}
    record = replace(head, rows=rows, summary={**summary(peer_rows), **skips})
    return Report(
        record.as_dict(),
        is_exact(peer_rows),
        "\n".join(map(str, skipped)),
        tables=[*tables(peer_rows)],
        journal=journal_path(output),
    )
