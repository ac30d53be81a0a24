"""`bench peers`: other runtimes and paceline on the same prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.bench.ab_test import about
from paceline.bench.journal import journal_path, open_journal
from paceline.bench.measurement import Measurement
from paceline.bench.record import PACKAGES, Record, here
from paceline.bench.servers import Access
from paceline.bench.suite import Suite, load_suite
from paceline.errors import MissingExtra
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.storage.report import Report
from paceline_lab.peers.base import Question
from paceline_lab.peers.measure import contenders_of, measure_all
from paceline_lab.peers.paceline_peer import PacelinePeer
from paceline_lab.peers.registry import KNOWN, check_names, open_all
from paceline_lab.peers.summary import PeerRows, is_exact, summary, tables
from paceline_lab.peers.target import TargetModel


def bench_peers(
    load: Callable[[], Model],
    measurement: Measurement,
    *,
    peers: Sequence[str],
    access: Access,
    draft: str | None,
    threads: int | None,
    progress: Progress,
) -> Report:
    """Every peer and paceline, plain and with speculation, on a suite, interleaved.

    `peers` are names or base URLs of servers (none: all installed peers), `draft` is a smaller
    model for peers that use one as drafter, and `threads` is the CPU threads of every peer.

    Raises:
        InvalidRequest: there is no such peer or server, or a value is invalid.
        MissingExtra: a named peer is not installed, or without names none is.
        ModelError: a named peer cannot run this model.
    """
    rounds, max_tokens, output = measurement.rounds, measurement.max_tokens, measurement.output
    prompts = load_suite(measurement.suite).only(measurement.kinds, measurement.per_kind)
    check_names(peers)
    access.check()
    model = load()
    model.measure_profile()
    questions = _questions(prompts, model)
    context = max(len(question.tokens) for question in questions) + max_tokens
    with TargetModel(
        model.files, context=context, threads=threads, draft=draft, progress=progress
    ) as target:
        opened = open_all(peers, target, access, progress)
        if not opened:
            raise MissingExtra(f"no peer is installed; install one of {', '.join(KNOWN)} with pip")
        contenders = contenders_of(PacelinePeer(model), opened)
        head = Record(
            "peers",
            rows=[],
            settings={
                "peers": {peer.name: peer.settings for peer in opened},
                "contenders": [contender.name for contender in contenders],
                "rounds": rounds,
                "max_tokens": max_tokens,
                "prompts": len(questions),
                "kinds": [*measurement.kinds],
            },
            suite_sha256=prompts.sha256,
            **about(model),
            **here([*PACKAGES, *dict.fromkeys(name for peer in opened for name in peer.packages)]),
        )
        with open_journal(output, head) as journal:
            for contender in contenders:  # warm-up
                contender.answer(questions[0], max_tokens)
            rows = measure_all(
                questions,
                contenders,
                rounds=rounds,
                max_tokens=max_tokens,
                journal=journal,
                progress=progress,
            )
    peer_rows = PeerRows(rows)
    record = replace(head, rows=rows, summary=summary(peer_rows))
    return Report(
        record.as_dict(),
        is_exact(peer_rows),
        tables=[*tables(peer_rows)],
        journal=journal_path(output),
    )


def _questions(prompts: Suite, model: Model) -> list[Question]:
    return [
        Question(prompt.id, prompt.kind, prompt.messages, model.tokens(prompt.messages))
        for prompt in prompts.prompts
    ]
