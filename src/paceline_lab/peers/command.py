"""`bench peers`: other runtimes and paceline on the same prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.client import Access
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.storage.report import Report
from paceline.verify.suite import SuitePrompt, prompt_for
from paceline_lab.bench.ab_test import about, max_context
from paceline_lab.bench.journal import open_journal
from paceline_lab.bench.prompts import chosen_prompts
from paceline_lab.bench.record import Record
from paceline_lab.bench.turns import measure_turns
from paceline_lab.journals import journal_path
from paceline_lab.peers.base import Peer
from paceline_lab.peers.llama_server.binary import PROGRAM, server_binary
from paceline_lab.peers.llama_server.peer import LlamaServer
from paceline_lab.peers.measure import contenders_of, measure
from paceline_lab.peers.paceline_peer import PacelinePeer
from paceline_lab.peers.server import ServerPeer
from paceline_lab.peers.summary import is_exact, speeds, tables

_SPARE = 64
"""Tokens more than an answer had that its text may be in the next prompt."""


def bench_peers(
    load: Callable[[], Model],
    *,
    rounds: int,
    max_tokens: int,
    kinds: Sequence[str] = (),
    per_kind: int | None = None,
    suite: Path | None = None,
    output: Path | None = None,
    limit: int | None = None,
    peers: Sequence[str],
    llama_server: str | None = None,
    access: Access,
    threads: int | None,
    progress: Progress,
) -> Report:
    """Every peer and paceline, plain and with speculation, on a suite, interleaved.

    `load` opens the model, and `access` is for requests to servers; the rest is as on the command
    line.

    Raises:
        InvalidRequest: there is no such peer, server or program, or a value is invalid.
        MissingExtra: llama-server is not installed.
        ModelError: a peer cannot run this model.
    """
    prompts = chosen_prompts(suite, kinds, per_kind, limit)
    if llama_server is not None or not peers:
        peers = [*peers, PROGRAM]
    for name in peers:
        if not (name == PROGRAM or _is_url(name)):
            raise InvalidRequest(
                f"no peer is called {name!r}; expected {PROGRAM}, or a server's base URL, as "
                "http://127.0.0.1:8080/v1"
            )
    binary = server_binary(llama_server) if PROGRAM in peers else None
    model = load()
    model.measured_costs()
    context = min(max_context(model), _needed_context(prompts.prompts, model, max_tokens))
    opened: list[Peer] = []
    for name in dict.fromkeys(peers):
        with progress.task(f"opening {name}"):
            if binary is None or _is_url(name):
                opened.append(ServerPeer(name, access))
                continue
            opened.append(
                LlamaServer(model.files, binary, context, threads=threads, say=progress.say)
            )
    contenders = contenders_of(PacelinePeer(model), opened)
    head = Record(
        "peers",
        rows=[],
        settings={
            "peers": {peer.name: peer.settings for peer in opened},
            "contenders": [contender.name for contender in contenders],
            "rounds": rounds,
            "max_tokens": max_tokens,
            "prompts": len(prompts.prompts),
            "kinds": [*kinds],
            **({} if limit is None else {"limit": limit}),
        },
        suite_sha256=prompts.sha256,
        **about(model),
    )
    with open_journal(output, head) as journal:
        rows, skipped = measure_turns(
            prompts.prompts,
            model,
            room=context,
            max_tokens=max_tokens,
            warm_up=lambda turn: [contender.answer(turn, max_tokens) for contender in contenders],
            measure=lambda turn, place: measure(
                turn, contenders, rounds=rounds, max_tokens=max_tokens, start=place
            ),
            journal=journal,
            progress=progress,
        )
    skips = {"skipped": [turn._asdict() for turn in skipped]}
    record = replace(
        head, rows=rows, summary={"same_tokens": is_exact(rows), "speeds": speeds(rows), **skips}
    )
    return Report(
        record.as_dict(),
        is_exact(rows),
        "\n".join(map(str, skipped)),
        tables=[*tables(rows)],
        journal=journal_path(output),
    )


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _needed_context(prompts: Sequence[SuitePrompt], model: Model, max_tokens: int) -> int:
    """Tokens of the longest conversation with answers of `max_tokens`."""
    sizes = []
    for prompt in prompts:
        messages = [*prompt.messages]
        for following in prompt.turns:
            messages += [
                {"role": "assistant", "content": "."},
                {"role": "user", "content": following},
            ]
        answers = max_tokens + len(prompt.turns) * (max_tokens + _SPARE)
        sizes.append(len(model.tokens(prompt_for(model.files, messages))) + answers)
    return max(sizes)
