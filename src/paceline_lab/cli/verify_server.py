"""`paceline verify --url`: checks whether an OpenAI-compatible server repeats its outputs.

Greedy requests are answered one at a time, then again under other conditions: alone once more,
among requests of other clients, and with speculation where that can be chosen. An output that
differs from the first is reported with the position of the difference. Only texts are compared:
tokens with equal text are the same.
"""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Annotated, Any

from typer import Option

import paceline
from paceline.cli import declare
from paceline.cli.console import check_writable, print_report, progress_of
from paceline.cli.options import MaxTokens, Output, ResultFile, Suite, command
from paceline.errors import InvalidRequest
from paceline.options import IntRange
from paceline.storage.progress import Progress
from paceline.storage.report import Report
from paceline_lab.client import (
    PLAIN,
    SPECULATION,
    Access,
    EncodedQuestion,
    Sample,
    ServedModel,
    closed_loop,
    connect,
)

_SHOWN = 10
"""Maximum printed changed outputs and failed requests; the JSON has all of them."""

_EXCERPT = 24
"""Characters shown, starting at the first difference."""

_NOT_PLAIN = "tokens were drafted for plain answers: that server was started with speculation"
_SILENT = (
    "no answer with speculation reports drafted tokens: either this server does not report them, "
    "or it did not speculate, and nothing was checked; see its log"
)


@command(
    examples=(
        "paceline verify --url http://127.0.0.1:8000/v1",
        "paceline verify --url http://127.0.0.1:8080/v1 --plain-url http://127.0.0.1:8081/v1",
    ),
)
def verify(
    *,
    url: Annotated[str, Option(metavar="BASE", help="base URL of the server")],
    quick: Annotated[
        bool, Option("--quick", help="send one prompt of each kind, in one round")
    ] = False,
    suite: Suite = None,
    max_tokens: MaxTokens = 64,
    access: Access,
    plain_url: Annotated[
        str | None,
        Option(
            metavar="BASE",
            help="a second server of the same model, started without speculation",
        ),
    ] = None,
    clients: Annotated[
        int, Option(parser=IntRange(1, 1024), help="maximum concurrent requests")
    ] = 8,
    rounds: Annotated[int, declare.count(help="repetitions")] = 2,
    result: ResultFile = None,
    output: Output,
) -> int:
    """Check whether a server's outputs change under load or with speculation.

    The exit status is 1 if an output changed, a request failed, or a plain answer was drafted.
    """
    from paceline.verify.suite import load_suite

    check_writable(result)
    progress = progress_of(output)
    loaded = load_suite(suite)
    prompts = [(prompt.id, prompt.messages) for prompt in loaded.prompts]
    if quick:
        by_kind = {prompt.kind: (prompt.id, prompt.messages) for prompt in loaded.prompts}
        prompts, rounds = [*by_kind.values()], 1
    endpoints = {
        mode: replace(endpoint, max_tokens=max_tokens)
        for mode, endpoint in connect(url, access, plain_url).items()
    }
    passes = [*product(range(rounds), endpoints, (("alone", 1), (f"{clients} at once", clients)))]
    again = sum(max(len(prompts), at_once) for *_, (_, at_once) in passes)
    progress.note(f"{len(prompts) + again} requests, of at most {max_tokens} tokens each")
    expected = _first_answers(endpoints, prompts, progress)
    seconds = median(answer.seconds for answer in expected.values())
    progress.note(f"about {again * seconds / 60:.1f} min more, at {seconds:.1f} s per request")
    failed = [
        f"{name} (first): {answer.error}" for name, answer in expected.items() if answer.error
    ]
    conditions: dict[str, dict[str, int]] = {}
    changed: list[str] = []
    drafted = dict.fromkeys(endpoints, 0)
    for turn, mode, (company, at_once) in passes:
        condition = f"{mode}, {company}"
        # A different order, and so different concurrent requests, in every round.
        order = [*prompts[turn:], *prompts[:turn]]
        requests = max(len(order), at_once)  # a short list is repeated
        label = f"round {turn + 1} of {rounds}: {condition}"
        with progress.task(label, requests, unit="requests") as reach:
            answers = closed_loop(
                endpoints[mode], order, clients=at_once, requests=requests, watch=reach
            )
        counts = conditions.setdefault(condition, {"texts": 0, "changed": 0, "failed": 0})
        for answer in answers:
            drafted[mode] += answer.drafted
            first = expected[answer.prompt]
            if first.error:
                continue
            if answer.error:
                failed.append(f"{answer.prompt} ({condition}): {answer.error}")
            elif answer.text != first.text:
                changed.append(_change(answer.prompt, condition, first.text, answer.text))
            counts["texts"] += not answer.error
            counts["failed"] += bool(answer.error)
            counts["changed"] += not answer.error and answer.text != first.text
    warnings = [_NOT_PLAIN] if drafted.get(PLAIN) else []
    exact = not (changed or failed or warnings)
    if drafted.get(SPECULATION) == 0:
        warnings.append(_SILENT)
    server = [*endpoints.values()][-1]
    value = {
        "paceline": paceline.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "server": server.name,
        "model": server.model,
        "plain_server": endpoints.get(PLAIN, server).name,
        "suite_sha256": loaded.sha256,
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "clients": clients,
        "rounds": rounds,
        "conditions": conditions,
        "changed": changed,
        "failed": failed,
        "drafted": drafted,
        "warnings": warnings,
        "exact": exact,
    }
    head = ("requests", "texts", "changed", "failed")
    rows = [[condition, *map(str, counts.values())] for condition, counts in conditions.items()]
    text = "\n".join(_lines(value))
    report = Report(value, exact, text, [(f"texts of {server.name}", head, rows)])
    return print_report(report, output, result)


def _first_answers(
    endpoints: Mapping[str, ServedModel], prompts: Sequence[EncodedQuestion], progress: Progress
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


def _change(prompt: str, condition: str, first: str, other: str) -> str:
    """Return the position where a text differs from its prompt's first one, and both excerpts."""
    pairs = zip(first, other, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(other)))
    texts = (repr(text[same : same + _EXCERPT]) for text in (first, other))
    return f"{prompt} ({condition}): character {same}: {', '.join(texts)}"


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
