"""`verify --url`: whether an OpenAI-compatible server gives the same text to the same request.

Greedy requests are answered one at a time, then again in other company: alone once more, among
requests of other clients, and with speculation where fields of a request select it. A text that
differs from the first is reported with the place where it does. Only texts are compared: tokens
that read the same are the same.
"""

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import paceline
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.report import Report, Table
from paceline.verify.arguments import Verification
from paceline.verify.client import PLAIN, SPECULATION, Access, Endpoint, Sample, Server, closed_loop
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


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the prompts."""

    condition: str
    clients: int
    mode: str
    turn: int
    """Number of prompts that the order is rotated by: another company in every round."""


def verify_server(
    url: str,
    access: Access,
    checked: Verification,
    progress: Progress,
    *,
    clients: int,
    rounds: int,
) -> Report:
    """Compare a server's texts; the report passes if none changed and no request failed.

    `clients` is the number of requests at once, `rounds` that of repetitions.

    A plain answer for which tokens were drafted is a failed request.

    Raises InvalidRequest if there is no OpenAI-compatible server at a URL, it requires another
    key, does not answer the first request, or drafts for it although that should be plain.
    """
    prompts = load_suite(checked.suite)
    access.check()
    server = Server(url, access)
    endpoints = {mode: server.endpoint(mode, checked.max_tokens) for mode in server.modes}
    first, *others = _passes(server.modes, clients, rounds)
    with progress.task(first.condition, len(prompts.prompts), unit="requests") as reach:
        expected = _texts(endpoints[first.mode], first.mode, prompts.prompts, reach)
    conditions: dict[str, dict[str, int]] = {}
    changed: list[Changed] = []
    drafted = dict.fromkeys(server.modes, 0)
    failed = [
        f"{sample.prompt} (first): {sample.error}" for sample in expected.values() if sample.error
    ]
    for pass_ in others:
        order = [*prompts.prompts[pass_.turn :], *prompts.prompts[: pass_.turn]]
        endpoint = endpoints[pass_.mode]
        requests = max(len(order), pass_.clients)  # few prompts are repeated
        with progress.task(pass_.condition, requests, unit="requests") as reach:
            run = closed_loop(
                endpoint,
                order,
                clients=pass_.clients,
                requests=requests,
                watch=_counting(reach),
            )
        samples = [_checked(sample, pass_.mode) for sample in run.samples]
        compared = [sample for sample in samples if not expected[sample.prompt].error]
        drafted[pass_.mode] += sum(sample.drafted for sample in samples)
        failures = [sample for sample in compared if sample.error]
        differing = [*_differing(pass_.condition, compared, expected)]
        counted = conditions.setdefault(pass_.condition, {"texts": 0, "changed": 0, "failed": 0})
        counted["texts"] += len(compared) - len(failures)
        counted["changed"] += len(differing)
        counted["failed"] += len(failures)
        failed += [f"{sample.prompt} ({pass_.condition}): {sample.error}" for sample in failures]
        changed += differing
    exact = not (changed or failed)
    warnings = [_SILENT] if drafted.get(SPECULATION) == 0 else []
    value = {
        "paceline": paceline.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "server": server.name,
        **server.settings,
        "suite_sha256": prompts.sha256,
        "prompts": len(prompts.prompts),
        "max_tokens": checked.max_tokens,
        "clients": clients,
        "rounds": rounds,
        "conditions": conditions,
        "changed": [asdict(change) for change in changed],
        "failed": failed,
        "drafted": drafted,
        "warnings": warnings,
        "exact": exact,
    }
    return Report(value, exact, _text(value, changed), [_table(server.name, conditions)])


def _passes(modes: Sequence[str], clients: int, rounds: int) -> Iterator[Pass]:
    """The reference pass, then those that are compared with it."""
    yield Pass(f"{modes[0]}, alone", 1, modes[0], 0)
    for number in range(rounds):
        for mode in modes:
            yield Pass(f"{mode}, alone", 1, mode, number)
            yield Pass(f"{mode}, {clients} at once", clients, mode, number)


def _counting(reach: Callable[[int], None]) -> Callable[[Sample], None]:
    done = count(1)
    return lambda _: reach(next(done))


def _checked(sample: Sample, mode: str) -> Sample:
    """The answer; one that should be plain, and for which tokens were drafted, is a failure."""
    if mode == PLAIN and sample.drafted and not sample.error:
        return replace(sample, error=f"{sample.drafted} tokens were drafted for a plain answer")
    return sample


def _texts(
    endpoint: Endpoint, mode: str, prompts: Sequence[SuitePrompt], reach: Callable[[int], None]
) -> Mapping[str, Sample]:
    """Prompt -> its first answer. Raises InvalidRequest if the first of all fails."""
    answers: dict[str, Sample] = {}
    for number, prompt in enumerate(prompts, start=1):
        (sample,) = closed_loop(endpoint, [prompt], clients=1, requests=1).samples
        if not (sample.text or sample.error):
            sample = replace(sample, error="the answer has no text to compare")
        sample = _checked(sample, mode)
        if mode == PLAIN and sample.drafted and not answers:
            raise InvalidRequest(
                f"{endpoint.url}: {sample.error}, so speculation would be compared with itself; "
                "start a second server without speculation, and give it with --plain-url"
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


def _table(name: str, conditions: Mapping[str, Mapping[str, int]]) -> Table:
    rows = [[condition, *map(str, counts.values())] for condition, counts in conditions.items()]
    return (f"texts of {name}", ("requests", "texts", "changed", "failed"), rows)


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
