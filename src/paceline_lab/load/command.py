"""`bench serve`: throughput and latency of any OpenAI-compatible server under load."""

import json
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.report import Report
from paceline.verify.client import Endpoint, LoadRun, closed_loop, key_for, model_of
from paceline.verify.suite import load_suite
from paceline_lab.arguments import ServerLoad
from paceline_lab.bench.record import Record, Row, here
from paceline_lab.load.loops import load_facts, open_loop

_CLIENTS = (1, 8)
"""Numbers of clients of a load that names neither clients nor rates."""


def bench_serve(load: ServerLoad, progress: Progress) -> Report:
    """Measure a server with every number of clients, and at every rate of requests per second.

    Raises InvalidRequest if there is no server at the URL, or a value is out of range.
    """
    prompts = load_suite(load.suite).only(load.kinds, None)
    url = load.url.rstrip("/")
    try:
        fields = json.loads(load.extra)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"--extra is {load.extra!r}; expected a JSON object")
    key = key_for(url, load.api_key)
    endpoint = Endpoint(url, load.model or model_of(url, key), load.max_tokens, key, load.extra)
    clients = load.clients or (() if load.rates else _CLIENTS)
    requests = load.requests
    loads: list[tuple[str, Callable[..., LoadRun]]] = [
        *((f"{n} clients", partial(closed_loop, clients=n)) for n in clients),
        *((f"{rate:g} requests/s", partial(open_loop, rate=rate)) for rate in load.rates),
    ]
    runs = []
    for name, run in loads:
        with progress.task(
            f"requests to {endpoint.model}: {name}", requests, unit="requests"
        ) as reach:
            done = count(1)
            watch = lambda _, done=done, reach=reach: reach(next(done))  # noqa: E731
            runs.append(run(endpoint, prompts.prompts, requests=requests, watch=watch))
    settings = {"url": url, "extra": fields, "max_tokens": load.max_tokens, "kinds": [*load.kinds]}
    record = Record(
        "serve",
        [_row(endpoint, run) for run in runs],
        settings={**settings, "requests": requests},
        suite_sha256=prompts.sha256,
        **here(),
    )
    rows = [_line(load_facts(run)) for run in runs]
    head = ("load", "tokens/s", "first token p50", "p99", "per token p50", "p99", "failed")
    passed = not any(row.facts["failed"] for row in record.rows)
    return Report(record.as_dict(), passed, tables=[(f"{endpoint.model} at {url}", head, rows)])


def _row(endpoint: Endpoint, run: LoadRun) -> Row:
    """Row of one load; measures of single requests have a value per request, not per round."""
    facts = load_facts(run)
    good = [sample for sample in run.samples if sample.error is None]
    measures = {
        "tokens_per_second": [facts.pop("tokens_per_second")],
        "requests_per_second": [facts.pop("requests_per_second")],
        "first_token_seconds": [sample.first for sample in good if sample.first is not None],
        "per_token_seconds": [
            seconds for sample in good if (seconds := sample.per_token) is not None
        ],
    }
    measured = {name: values for name, values in measures.items() if values}
    return Row(facts.pop("load"), "any", endpoint.model, measured, facts=facts)


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
