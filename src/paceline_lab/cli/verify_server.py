"""`paceline verify --url`: checks whether an OpenAI-compatible server repeats its outputs.

Greedy requests are answered one at a time, then again under other conditions: alone once more,
with a cached prefix, among requests of other clients, with speculation where that can be chosen,
and after a restart (`--against`). An output that differs from the first is reported with the
position of the difference. Only texts are compared: tokens with equal text are the same.
"""

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

from typer import Option

import paceline
from paceline.cli import declare
from paceline.cli.console import check_writable, print_report, progress_of
from paceline.cli.options import MaxTokens, Output, ResultFile, Suite, command
from paceline.errors import InvalidRequest
from paceline.options import IntRange
from paceline.storage.files import read_json
from paceline.storage.progress import Progress
from paceline.storage.report import Report
from paceline_lab.cli.options import Limit
from paceline_lab.client import (
    SPECULATION,
    Access,
    PromptMessages,
    Sample,
    ServedModel,
    closed_loop,
    connect,
)

FIRST, ALONE, CACHED, AT_ONCE = "first", "alone", "cached prefix", "at once"
"""Conditions. FIRST is one of a run that is compared with an earlier run. ALONE and CACHED share a
pass."""

_UNCACHED = {"cache_prompt": False}
"""A field of paceline and llama.cpp; other servers ignore it, and may use cached prefixes."""

_SHOWN = 10
"""Maximum printed changed outputs and failed requests; the JSON has all of them."""

_EXCERPT = 24
"""Characters shown, starting at the first difference."""

_SILENT = (
    "no draft tokens are reported, so speculation was not checked; was the server started with "
    "--drafter none?"
)


@command(
    examples=(
        "paceline verify --url http://127.0.0.1:8000/v1",
        "paceline verify --url http://127.0.0.1:8080/v1 --against before-the-restart.json",
    ),
)
def verify(
    *,
    url: Annotated[str, Option(metavar="BASE", help="base URL of the server")],
    quick: Annotated[
        bool, Option("--quick", help="send one prompt of each kind, in one round")
    ] = False,
    suite: Suite = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 64,
    access: Access,
    against: Annotated[
        Path | None,
        declare.file(
            "--against",
            help="compare with the outputs in this result of an earlier run: before a restart, or "
            "without speculation",
        ),
    ] = None,
    clients: Annotated[
        int, Option(parser=IntRange(1, 1024), help="maximum concurrent requests")
    ] = 8,
    rounds: Annotated[
        int, Option(parser=IntRange(0), help="repetitions; 0: only record outputs, for --against")
    ] = 2,
    result: ResultFile = None,
    output: Output,
) -> int:
    """Check whether a server's outputs change: under load, with a cached prefix or speculation.

    The exit status is 1 if an output changed or a request failed.
    """
    from paceline_lab.bench.summary import is_loop
    from paceline_lab.bench.turns import chosen_prompts

    check_writable(result)
    progress = progress_of(output)
    chosen = chosen_prompts(suite, limit)
    prompts = [(prompt.id, prompt.messages) for prompt in chosen.prompts]
    if quick:
        by_kind = {prompt.kind: (prompt.id, prompt.messages) for prompt in chosen.prompts}
        prompts, rounds = [*by_kind.values()], min(rounds, 1)
    asked = {"suite_sha256": chosen.sha256, "prompts": len(prompts), "max_tokens": max_tokens}
    endpoints = {
        mode: replace(endpoint, max_tokens=max_tokens, fields={**endpoint.fields, **_UNCACHED})
        for mode, endpoint in connect(url, access).items()
    }
    earlier = None if against is None else _earlier(against, asked)
    if earlier and (missing := {name for name, _ in prompts} - earlier.keys()):
        raise InvalidRequest(
            f"{against} has no output for {min(missing)}; give the options of that run"
        )
    together = f"{clients} {AT_ONCE}"
    conditions = (*([] if earlier is None else [FIRST]), CACHED, together)
    passes = [*product(range(rounds), endpoints, conditions)]
    number = len(prompts)
    sizes = {CACHED: 3 * number, together: max(number, clients)}  # a short list is repeated
    again = sum(sizes.get(condition, number) for *_, condition in passes)
    if rounds:  # and the probabilities
        again += len(endpoints) * (min(number, clients) + clients)
    first = number if earlier is None else 0
    progress.note(f"{first + again} requests, of at most {max_tokens} tokens each")
    expected = earlier or _first_answers(endpoints, prompts, progress)
    if earlier is None:
        seconds = median(answer.seconds for answer in expected.values())
        progress.note(f"about {again * seconds / 60:.1f} min more, at {seconds:.1f} s per request")
    found = _Found(expected, endpoints)
    for turn, mode, name in passes:
        # A different order, and so different concurrent requests, in every round.
        order = [*prompts[turn:], *prompts[:turn]]
        requests, label = sizes.get(name, number), f"round {turn + 1} of {rounds}: {mode}, {name}"
        with progress.task(label, requests, unit="requests") as reach:
            if name == CACHED:
                for own in _alone_and_cached(endpoints[mode], order, reach):
                    found.add(mode, *own)
                continue
            at_once = clients if name == together else 1
            began = perf_counter()
            answers = closed_loop(
                endpoints[mode], order, clients=at_once, requests=requests, watch=reach
            )
            found.add(mode, name, answers, perf_counter() - began)
    exact = not (found.changed or found.failed)
    is_silent = bool(rounds) and found.drafted.get(SPECULATION) == 0
    server = [*endpoints.values()][-1]
    value = {
        "paceline": paceline.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "server": server.name,
        "model": server.model,
        **asked,
        "clients": clients,
        "rounds": rounds,
        "conditions": found.conditions,
        "changed": found.changed,
        "median_place": {mode: median(all_of) for mode, all_of in found.places.items() if all_of},
        "failed": found.failed,
        "drafted": found.drafted,
        "probabilities": {
            mode: _probabilities(endpoint, prompts[:clients], clients, progress)
            for mode, endpoint in endpoints.items()
            if rounds
        },
        "loops": sum(is_loop(answer.text.split()) for answer in expected.values()),
        "warnings": [_SILENT] if is_silent else [],
        "exact": exact,
        "texts": {one.prompt: None if one.error else one.text for one in expected.values()},
    }
    return print_report(Report(value, exact, "\n".join(_lines(value))), output, result)


class _Found:
    """The comparison of outputs with the expected ones, condition by condition."""

    def __init__(self, expected: Mapping[str, Sample], modes: Iterable[str]) -> None:
        self.expected = expected
        self.conditions: dict[str, dict[str, Any]] = {}
        self.changed: list[str] = []
        self.failed = [
            f"{name} (first): {one.error}" for name, one in expected.items() if one.error
        ]
        self.drafted = dict.fromkeys(modes, 0)
        self.places: dict[str, list[int]] = {mode: [] for mode in self.drafted}

    def add(self, mode: str, name: str, answers: Sequence[Sample], seconds: float) -> None:
        """Compare the outputs of a pass under the condition `name`."""
        condition = f"{mode}, {name}"
        names = ("texts", "changed", "failed", "tokens", "cached_tokens", "seconds")
        counts = self.conditions.setdefault(condition, dict.fromkeys(names, 0))
        counts["seconds"] += round(seconds, 3)
        for answer in answers:
            self.drafted[mode] += answer.drafted
            first, text = self.expected[answer.prompt], answer.text
            if first.error:
                continue
            if answer.error:
                counts["failed"] += 1
                self.failed.append(f"{answer.prompt} ({condition}): {answer.error}")
                continue
            counts["texts"] += 1
            counts["tokens"] += answer.tokens
            counts["cached_tokens"] += answer.cached_tokens
            if text != first.text:
                counts["changed"] += 1
                pairs = enumerate(zip(first.text, text, strict=False))
                lengths = len(first.text), len(text)
                place = next((at for at, (a, b) in pairs if a != b), min(lengths))
                self.places[mode].append(place)
                ends = (repr(one[place : place + _EXCERPT]) for one in (first.text, text))
                self.changed.append(
                    f"{answer.prompt} ({condition}): character {place}: {', '.join(ends)}"
                )


def _earlier(path: Path, asked: Mapping[str, Any]) -> Mapping[str, Sample]:
    """Return prompt -> output in an earlier run's result.

    Raises InvalidRequest if that run had other prompts, or another maximum of tokens.
    """
    record = read_json(path)
    for name, value in asked.items():
        if record.get(name) != value or not isinstance(record.get("texts"), dict):
            raise InvalidRequest(
                f"{path} has other outputs: its {name} is {record.get(name)}, not {value}; give "
                "the options of that run"
            )
    return {
        name: Sample(
            name, 0.0, text=text or "", error=None if text else "no output to compare with"
        )
        for name, text in record["texts"].items()
    }


def _first_answers(
    endpoints: Mapping[str, ServedModel], prompts: Sequence[PromptMessages], progress: Progress
) -> Mapping[str, Sample]:
    """Return prompt -> first-mode answer, alone. Raises InvalidRequest if the first one fails."""
    mode, endpoint = next(iter(endpoints.items()))
    answers: dict[str, Sample] = {}
    with progress.task(f"first answers: {mode}, alone", len(prompts), unit="requests") as reach:
        for number, prompt in enumerate(prompts, start=1):
            (answer,) = closed_loop(endpoint, [prompt], clients=1, requests=1)
            if not (answer.text or answer.error):
                answer = replace(answer, error="the answer has no text to compare")
            if answer.error and not answers:
                raise InvalidRequest(
                    f"{endpoint.url} does not answer for the model {endpoint.model}: {answer.error}"
                )
            answers[answer.prompt] = answer
            reach(number)
    return answers


def _alone_and_cached(
    endpoint: ServedModel, prompts: Sequence[PromptMessages], watch: Callable[[int], None]
) -> Iterator[tuple[str, Sequence[Sample], float]]:
    """Return the answers to prompts without a prefix cache and with one, and their seconds.

    A request for one token, in between, leaves its prompt in the cache.
    """
    cached = replace(endpoint, fields={**endpoint.fields, "cache_prompt": True})
    requests = (endpoint, replace(cached, max_tokens=1), cached)
    answers: list[Sample] = []
    for prompt, asked in product(prompts, requests):
        answers += closed_loop(asked, [prompt], clients=1, requests=1)
        watch(len(answers))
    for name, own in ((ALONE, answers[::3]), (CACHED, answers[2::3])):
        yield name, own, sum(answer.seconds for answer in own)


def _probabilities(
    endpoint: ServedModel, prompts: Sequence[PromptMessages], clients: int, progress: Progress
) -> Mapping[str, Sequence[float]]:
    """Return prompt -> the first token's probability, alone and at once, where both are reported.

    In requests of their own, since servers may compute requests with `logprobs` in another way.
    """
    fields = {**endpoint.fields, "logprobs": True, "top_logprobs": 1}
    endpoint = replace(endpoint, max_tokens=1, fields=fields)
    both: list[dict[str, float]] = []
    for at_once in (1, clients):
        requests = max(len(prompts), at_once)
        label = f"probabilities: {at_once} {AT_ONCE}"
        with progress.task(label, requests, unit="requests") as reach:
            answers = closed_loop(
                endpoint, prompts, clients=at_once, requests=requests, watch=reach
            )
        both.append({a.prompt: a.probability for a in answers if a.probability is not None})
    return {name: (value, both[1][name]) for name, value in both[0].items() if name in both[1]}


def _lines(value: Mapping[str, Any]) -> Iterator[str]:
    faults = [*value["changed"][:_SHOWN], *value["failed"][:_SHOWN]]
    yield from faults
    if more := len(value["changed"]) + len(value["failed"]) - len(faults):
        yield f"and {more} more"
    yield from (f"warning: {warning}" for warning in value["warnings"])
    texts = sum(counts["texts"] for counts in value["conditions"].values())
    is_same = not (value["changed"] or value["failed"])
    yield (
        f"{value['server']} {'gave' if is_same else 'did NOT give'} the same text every "
        f"time: {len(value['changed'])} of {texts} texts changed, {len(value['failed'])} requests "
        "failed"
    )
    yield ""
    rows = (row(value, mode, f"{value['server']}, {mode}") for mode in value["drafted"])
    yield from markdown(value["clients"], rows)


def markdown(clients: int, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Return the table's lines: the texts that changed in each condition, one row per server."""
    conditions = (FIRST, ALONE, CACHED, f"{clients} {AT_ONCE}")
    head = ("server", *conditions, "place", "probability", f"speed, {clients} over 1")
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cells)} |"


def row(value: Mapping[str, Any], mode: str, name: str) -> Sequence[str]:
    """Return the cells of a result's mode.

    They are the changed texts of each condition, the median character of the first difference, the
    largest change of a first token's probability, and the speed with all clients over that of one.
    """
    together = f"{value['clients']} {AT_ONCE}"
    found = {name: value["conditions"].get(f"{mode}, {name}") for name in (FIRST, ALONE, CACHED)}
    found[together] = value["conditions"].get(f"{mode}, {together}")
    rates = [
        counts["tokens"] / counts["seconds"] if counts and counts["seconds"] else 0.0
        for counts in (found[ALONE], found[together])
    ]
    changes = [abs(one - other) for one, other in value["probabilities"].get(mode, {}).values()]
    place = value["median_place"].get(mode)
    return (
        name,
        *(_cell(counts) for counts in found.values()),
        "-" if place is None else f"{place:.0f}",
        f"{max(changes):.2g}" if changes else "-",
        f"{rates[1] / rates[0]:.2f}" if all(rates) else "-",
    )


def _cell(counts: Mapping[str, Any] | None) -> str:
    if counts is None:
        return "-"
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['changed']} of {counts['texts']}{failed}"
