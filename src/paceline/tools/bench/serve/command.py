"""`bench serve`: a server under load, ours or another's."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.report import Report
from paceline.tools.bench.record import Record, Row, here
from paceline.tools.bench.serve.load import Run, Target, closed_loop, model_of, open_loop
from paceline.tools.suite import load_suite


def bench_serve(
    *,
    url: str,
    model: str | None,
    key: str | None,
    clients: Sequence[int],
    rates: Sequence[float],
    requests: int,
    suite: Path | None,
    kinds: Sequence[str],
    max_tokens: int,
    extra: str,
    progress: Progress,
) -> Report:
    """A server under load: with so many clients at once, and with requests at so many a second.

    Raises:
        InvalidRequest: there is no such server, or a value is out of range.
    """
    prompts = load_suite(suite).only(kinds, None)
    url = url.rstrip("/")
    try:
        fields = json.loads(extra)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"--extra is {extra!r}; expected a JSON object")
    target = Target(url, model or model_of(url, key), max_tokens, key, extra)
    loads: list[tuple[str, Callable[..., Run]]] = [
        *((f"{n} clients", partial(closed_loop, clients=n)) for n in clients),
        *((f"{rate:g} requests/s", partial(open_loop, rate=rate)) for rate in rates),
    ]
    runs = []
    for name, run in loads:
        with progress.task(f"asking {target.model}: {name}", requests, unit="requests") as reach:
            done = count(1)
            watch = lambda _, done=done, reach=reach: reach(next(done))  # noqa: E731
            runs.append(run(target, prompts.prompts, requests=requests, watch=watch))
    settings = {"url": url, "extra": fields, "max_tokens": max_tokens, "kinds": [*kinds]}
    record = Record(
        "serve",
        [_row(target, run) for run in runs],
        settings={**settings, "requests": requests},
        suite_sha256=prompts.sha256,
        **here(),
    )
    rows = [_line(run.as_dict()) for run in runs]
    head = ("load", "tokens/s", "first token p50", "p99", "per token p50", "p99", "failed")
    passed = not any(row.facts["failed"] for row in record.rows)
    return Report(record.as_dict(), passed, tables=[(f"{target.model} at {url}", head, rows)])


def _row(target: Target, run: Run) -> Row:
    """One load; for what each request has, its requests stand in the place of rounds."""
    facts = run.as_dict()
    good = [sample for sample in run.samples if sample.error is None]
    measures = {
        "tokens_per_second": [facts.pop("tokens_per_second")],
        "requests_per_second": [facts.pop("requests_per_second")],
        "first_token_seconds": [one.first for one in good if one.first is not None],
        "per_token_seconds": [each for one in good if (each := one.per_token) is not None],
    }
    kept = {name: values for name, values in measures.items() if values}
    return Row(facts.pop("load"), "any", target.model, kept, facts=facts)


def _line(run: dict[str, Any]) -> list[str]:
    def milliseconds(name: str, which: str) -> str:
        return "-" if run[name] is None else f"{run[name][which] * 1e3:.0f} ms"

    return [
        run["load"],
        f"{run['tokens_per_second']:.1f}",
        milliseconds("first_token", "p50"),
        milliseconds("first_token", "p99"),
        milliseconds("per_token", "p50"),
        milliseconds("per_token", "p99"),
        f"{run['failed']} of {run['requests']}",
    ]
