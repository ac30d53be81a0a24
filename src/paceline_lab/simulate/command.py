"""`bench simulate`: texts replayed through drafters and policies, as a record."""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline import drafters as drafting
from paceline.drafters import DrafterResources
from paceline.drafters import Table as Successors
from paceline.drafters.table import KIND as TABLE
from paceline.drafters.table import TableFacts
from paceline.models import ModelFiles, Progress, resolve_drafter
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.runtime.request import check as check_options
from paceline.storage.manifest import read_manifest
from paceline.storage.report import Report
from paceline_lab.bench.ab_test import PLAIN, contender_options, options_facts
from paceline_lab.bench.record import Record, here
from paceline_lab.simulate.costs import SourcedCosts, parse_costs
from paceline_lab.simulate.replay import Recording, check, simulate
from paceline_lab.simulate.report import Total, rows_of, summary, tables
from paceline_lab.simulate.texts import Texts


def bench_simulate(
    load: Callable[[], Model],
    files: Callable[[], ModelFiles],
    *,
    drafters: Sequence[str],
    policies: Sequence[str],
    blocks: Sequence[int],
    model: str,
    texts: Sequence[Path],
    cost: str,
    carry: bool,
    progress: Progress,
) -> Report:
    """Simulate every drafter with every policy on some texts.

    `load` opens the model, only for this machine's costs; `files` opens its files, only to encode
    text. The model's name decides its shipped drafters. Texts: see `Texts`; drafters, policies and
    blocks: see `contender_options`; cost: see `parse_costs`. With `carry` the texts are consecutive
    requests of one process.

    Raises:
        InvalidRequest: a value is out of range, or a text or cost table cannot be read.
        ModelError: a drafter cannot be read.
    """
    options = contender_options(drafters, policies, blocks)
    options.pop(PLAIN, None)
    shared = drafter_resources(model, options, progress)
    recordings = Texts(files).read(texts)
    costs = parse_costs(cost, lambda: load().measured_costs())
    tokens = sum(len(recording.answer) for recording in recordings)
    began = perf_counter()
    totals = {}
    for name, settings in options.items():
        request = check_options(settings)
        with progress.task(f"simulating {name}", tokens, unit="tokens") as reach:
            totals[name] = Total(
                simulate(recordings, request, costs.table, shared, carry=carry, watch=reach)
            )
    took = perf_counter() - began
    record = Record(
        "simulate",
        rows=[*rows_of(totals)],
        settings={
            "model": Path(model).name,
            "contenders": options_facts(options),
            "cost": as_dict(costs),
            "carry": carry,
        },
        suite_sha256=digest(recordings),
        summary={name: summary(total) for name, total in totals.items()},
        **here(),
    )
    drafting = sum(
        total.sum(lambda simulation: simulation.draft_seconds) for total in totals.values()
    )
    steps = sum(total.steps for total in totals.values())
    text = (
        f"{len(recordings)} texts, {tokens:,} tokens of answers, simulated in {took:.1f} s "
        f"({tokens * len(totals) / took:,.0f} tokens/s); drafting took "
        f"{1e6 * drafting / max(steps, 1):.0f} microseconds a step here; costs: {costs.name}"
    )
    return Report(record.as_dict(), text=text, tables=[*tables(totals)])


def drafter_resources(
    model: str, options: Mapping[str, Options], progress: Progress
) -> DrafterResources:
    """Resources of the drafters of these contenders, which must not need the model.

    The vocabulary of a table is not checked: only the model's name is available.

    Raises:
        InvalidRequest: there is no such drafter, or it cannot be simulated.
        ModelError: a drafter cannot be read.
    """
    shared = DrafterResources(
        target=model,
        shipped=drafting.shipped(model),
        find=lambda name: resolve_drafter(name, progress),
    )
    for settings in options.values():
        spec = check_options(settings).drafter
        check(spec, shared)
        for part in spec.resolve(shared.shipped).parts:
            if part.kind != "table" or part.name in shared.tables:
                continue
            folder = shared.find(part.name) if part.name else shared.shipped.get(part.kind)
            if folder is not None:
                size = read_manifest(folder, TABLE, TableFacts).vocab_size
                shared.tables[part.name] = Successors.open(folder, size)
    return shared


def as_dict(costs: SourcedCosts) -> dict[str, Any]:
    """The cost table as JSON for the record."""
    table = costs.table
    facts = {
        "name": costs.name,
        "milliseconds": {str(rows): seconds * 1e3 for rows, seconds in table.seconds.items()},
        "context": table.context,
    }
    if table.per_token:
        per_token = {str(rows): seconds * 1e3 for rows, seconds in table.per_token.items()}
        facts["milliseconds_per_token_of_context"] = per_token
    return facts


def digest(recordings: Sequence[Recording]) -> str:
    text = json.dumps([[[*recording.prompt], [*recording.answer]] for recording in recordings])
    return sha256(text.encode()).hexdigest()
