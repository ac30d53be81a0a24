"""`verify --url`: whether an OpenAI-compatible server gives the same text to the same request.

Greedy requests are answered one at a time, then again in other company: alone once more, among
requests of other clients, and with speculation where fields of a request select it. A text that
differs from the first is reported with the place where it does. Only texts are compared: tokens
that read the same are the same.
"""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import paceline
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.report import Report
from paceline.verify.client import (
    PLAIN,
    SPECULATION,
    Access,
    Sample,
    ServedModel,
    closed_loop,
    connect,
)
from paceline.verify.suite import SuitePrompt, load_suite

_SHOWN = 10
"""Changed texts and failed requests that are printed; the JSON has all of them."""

_SILENT = (
    "no answer with speculation reports drafted tokens: either this server does not report them, "
    "or it did not speculate, and nothing was checked; see its log"
)

_EXCERPT = 24
"""Characters shown from the first difference on."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A text that is not the first one of its prompt."""

    prompt: str
    condition: str
    at: int
    """Characters that are the same."""
    first: str
    """The first text from there on, cut."""
    other: str
    """This text from there on, cut."""

    def __str__(self) -> str:
        return (
            f"{self.prompt} ({self.condition}): character {self.at}: {self.first!r}, {self.other!r}"
        )


def verify_server(
    url: str,
    access: Access,
    progress: Progress,
    *,
    suite: Path | None = None,
    max_tokens: int,
    clients: int,
    rounds: int,
) -> Report:
    """Compare a server's texts; the report passes if none changed and no request failed.

    `clients` is the number of requests at once, `rounds` that of repetitions.

    A plain answer for which tokens were drafted is a failed request.

    Raises InvalidRequest if there is no OpenAI-compatible server at a URL, it requires another
    key, does not answer the first request, or drafts for it although that should be plain.
    """
    prompts = load_suite(suite)
    connected = connect(url, access)
    endpoints = {
        mode: replace(endpoint, max_tokens=max_tokens) for mode, endpoint in connected.items()
    }
    expected = _first_answers(endpoints, prompts.prompts, progress)
    failed = [
        f"{sample.prompt} (first): {sample.error}" for sample in expected.values() if sample.error
    ]
    conditions: dict[str, dict[str, int]] = {}
    changed: list[Changed] = []
    drafted = dict.fromkeys(endpoints, 0)
    passes = product(range(rounds), endpoints, (("alone", 1), (f"{clients} at once", clients)))
    for turn, mode, (company, at_once) in passes:
        condition = f"{mode}, {company}"
        # Another order, and so another company, in every round.
        order = [*prompts.prompts[turn:], *prompts.prompts[:turn]]
        requests = max(len(order), at_once)  # few prompts are repeated
        with progress.task(condition, requests, unit="requests") as reach:
            run = closed_loop(
                endpoints[mode], order, clients=at_once, requests=requests, watch=reach
            )
        samples = [_checked(sample, mode) for sample in run.samples]
        drafted[mode] += sum(sample.drafted for sample in samples)
        compared = [sample for sample in samples if not expected[sample.prompt].error]
        failures = [sample for sample in compared if sample.error]
        differing = [*_differing(condition, compared, expected)]
        counts = conditions.setdefault(condition, {"texts": 0, "changed": 0, "failed": 0})
        counts["texts"] += len(compared) - len(failures)
        counts["changed"] += len(differing)
        counts["failed"] += len(failures)
        failed += [f"{sample.prompt} ({condition}): {sample.error}" for sample in failures]
        changed += differing
    exact = not (changed or failed)
    server = [*endpoints.values()][-1]
    plain = endpoints.get(PLAIN, server)
    value = {
        "paceline": paceline.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "server": server.name,
        "model": server.model,
        "fields": {mode: endpoint.fields for mode, endpoint in endpoints.items()},
        **({} if plain.url == server.url else {"plain_server": plain.name}),
        "suite_sha256": prompts.sha256,
        "prompts": len(prompts.prompts),
        "max_tokens": max_tokens,
        "clients": clients,
        "rounds": rounds,
        "conditions": conditions,
        "changed": [asdict(change) for change in changed],
        "failed": failed,
        "drafted": drafted,
        "warnings": [_SILENT] if drafted.get(SPECULATION) == 0 else [],
        "exact": exact,
    }
    head = ("requests", "texts", "changed", "failed")
    rows = [[condition, *map(str, counts.values())] for condition, counts in conditions.items()]
    return Report(value, exact, _text(value, changed), [(f"texts of {server.name}", head, rows)])


def _checked(sample: Sample, mode: str) -> Sample:
    """The answer; one that should be plain, and for which tokens were drafted, is a failure."""
    if mode == PLAIN and sample.drafted and not sample.error:
        return replace(sample, error=f"{sample.drafted} tokens were drafted for a plain answer")
    return sample


def _first_answers(
    endpoints: Mapping[str, ServedModel], prompts: Sequence[SuitePrompt], progress: Progress
) -> Mapping[str, Sample]:
    """Prompt -> its answer in the first mode, alone. Raises InvalidRequest if the first fails."""
    mode, endpoint = next(iter(endpoints.items()))
    answers: dict[str, Sample] = {}
    with progress.task(f"{mode}, alone", len(prompts), unit="requests") as reach:
        for number, prompt in enumerate(prompts, start=1):
            (sample,) = closed_loop(endpoint, [prompt], clients=1, requests=1).samples
            if not (sample.text or sample.error):
                sample = replace(sample, error="the answer has no text to compare")
            sample = _checked(sample, mode)
            if mode == PLAIN and sample.drafted and not answers:
                raise InvalidRequest(
                    f"{endpoint.url}: {sample.error}, so speculation would be compared with "
                    "itself; start a second server without speculation, and give it with "
                    "--plain-url"
                )
            if sample.error and not answers:
                raise InvalidRequest(
                    f"{endpoint.url} does not answer for the model {endpoint.model}: {sample.error}"
                )
            answers[prompt.id] = sample
            reach(number)
    return answers


def _differing(
    condition: str, samples: Sequence[Sample], expected: Mapping[str, Sample]
) -> Iterator[Changed]:
    for sample in samples:
        first = expected[sample.prompt].text
        if sample.error or sample.text == first:
            continue
        pairs = zip(first, sample.text, strict=False)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        at = min(len(first), len(sample.text)) if same is None else same
        end = at + _EXCERPT
        yield Changed(sample.prompt, condition, at, first[at:end], sample.text[at:end])


def _text(value: Mapping[str, Any], changed: Sequence[Changed]) -> str:
    texts = sum(counts["texts"] for counts in value["conditions"].values())
    lines = [*map(str, changed[:_SHOWN]), *value["failed"][:_SHOWN]]
    more = len(changed) + len(value["failed"]) - len(lines)
    if more:
        lines.append(f"and {more} more")
    lines += [f"warning: {warning}" for warning in value["warnings"]]
    verdict = "gave" if value["exact"] else "did NOT give"
    return "\n".join(
        [
            *lines,
            f"{value['server']} {verdict} the same text every time: {len(changed)} of {texts} "
            f"texts changed, {len(value['failed'])} requests failed",
        ]
    )
