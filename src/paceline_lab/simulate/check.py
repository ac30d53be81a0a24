"""`bench simulate --measure`: checks the simulation against the model on a suite.

Drafters and policies must take exactly the same steps in both; the expected speed-up of the cost
table is compared with the measured one. Kelly's rule reads the clock, so its steps may differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import geometric_mean, median
from typing import Any

from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.runtime.request import check
from paceline.storage.json_lines import journal_path
from paceline.storage.report import Report, Table
from paceline.verify.suite import load_suite
from paceline_lab.arguments import Comparison, Measurement
from paceline_lab.bench.ab_test import (
    PLAIN,
    Case,
    Contender,
    about,
    contender_options,
    measure,
    options_facts,
    warm_up,
)
from paceline_lab.bench.journal import open_journal
from paceline_lab.bench.record import Record, Row, here
from paceline_lab.simulate.command import drafter_resources
from paceline_lab.simulate.replay import Recording, Simulation, simulate

TOLERANCE = 0.1
"""Largest relative error of the expected mean speed-up."""

_READS_THE_CLOCK = "kelly"


def bench_simulate_check(
    load: Callable[[], Model],
    comparison: Comparison,
    measurement: Measurement,
    *,
    model: str,
    progress: Progress,
) -> Report:
    """Answer a suite, interleaved, and simulate the answers; the report passes if they agree.

    Raises:
        InvalidRequest: a value is out of range, or a drafter cannot be simulated.
        ModelError: a drafter cannot be read.
    """
    rounds, max_tokens, output = measurement.rounds, measurement.max_tokens, measurement.output
    prompts = load_suite(measurement.suite).only(measurement.kinds, measurement.per_kind)
    options = contender_options(comparison.drafters, comparison.policies, comparison.blocks)
    shared = drafter_resources(
        model, {name: settings for name, settings in options.items() if name != PLAIN}, progress
    )
    opened = load()
    cost = opened.profile.cost
    opened.fix_costs()  # else steps would change from answer to answer
    contenders = [Contender(name, opened, settings) for name, settings in options.items()]
    cases = [
        Case(prompt.id, prompt.kind, prompt.messages, {"max_tokens": max_tokens})
        for prompt in prompts.prompts
    ]
    head = Record(
        "simulate",
        rows=[],
        settings={
            "measured": True,
            "contenders": options_facts(options),
            "rounds": rounds,
            "max_tokens": max_tokens,
        },
        suite_sha256=prompts.sha256,
        **about(opened),
        **here(),
    )
    rows: list[Row] = []
    with open_journal(output, head) as journal:
        warm_up(contenders, cases[0])
        for number, case in enumerate(cases, start=1):
            known = journal.get(case.id)
            if known is None:
                plain, *others = measure(case, contenders, rounds=rounds, start=number)
                recording = Recording(
                    case.id,
                    case.kind,
                    plain.facts["prompt_token_ids"],
                    plain.facts["token_ids"],
                    max_tokens,
                )
                known = [plain]
                for row, contender in zip(others, contenders[1:], strict=True):
                    request = check(contender.options)
                    (simulation,) = simulate([recording], request, cost, shared)
                    exact = request.policy != _READS_THE_CLOCK
                    known.append(_with_expected(row, simulation, rounds, exact=exact))
                journal.add(case.id, known)
            rows += known
            progress.say(f"{number}/{len(cases)} {case.id}")
    same_steps = all(row.facts.get("same_steps", True) for row in rows)
    names = [name for name in options if name != PLAIN]
    errors = {name: _error_of_mean(rows, name) for name in names}
    record = replace(
        head,
        rows=rows,
        summary={
            "same_steps": same_steps,
            "error_of_mean": errors,
            "largest_error": {name: _largest_error(rows, name) for name in names},
        },
    )
    passed = same_steps and all(abs(error) <= TOLERANCE for error in errors.values())
    text = (
        f"steps {'are' if same_steps else 'are NOT'} the same; expected over measured speed-up: "
        + ", ".join(f"{name} {1 + error:.3f}" for name, error in errors.items())
    )
    return Report(record.as_dict(), passed, text, [_table(rows)], journal_path(output))


def _with_expected(row: Row, simulation: Simulation, rounds: int, *, exact: bool) -> Row:
    """A measured row with the simulated steps and the expected ratio."""
    counts = simulation.counters
    expected = {"steps": counts.steps, "drafted": counts.drafted, "accepted": counts.accepted}
    facts: dict[str, Any] = {**row.facts, "simulated": expected}
    if exact:
        facts["same_steps"] = all(row.counts[n] == rounds * value for n, value in expected.items())
    return replace(
        row, measures={**row.measures, "expected_ratio": [simulation.speed_up]}, facts=facts
    )


def _pairs(rows: Sequence[Row], contender: str) -> list[tuple[float, float]]:
    """(expected, measured) median ratio by case."""
    return [
        (row.measures["expected_ratio"][0], median(row.measures["ratio"]))
        for row in rows
        if row.contender == contender
    ]


def _error_of_mean(rows: Sequence[Row], contender: str) -> float:
    expected, measured = zip(*_pairs(rows, contender), strict=True)
    return geometric_mean(expected) / geometric_mean(measured) - 1


def _largest_error(rows: Sequence[Row], contender: str) -> float:
    return max((expected / measured - 1 for expected, measured in _pairs(rows, contender)), key=abs)


def _table(rows: Sequence[Row]) -> Table:
    head = ["prompt", "contender", "steps", "simulated", "accepted", "simulated"]
    lines = []
    for row in rows:
        if row.contender == PLAIN:
            continue
        expected, measured = row.measures["expected_ratio"][0], median(row.measures["ratio"])
        rounds = len(row.measures["ratio"])
        simulated = row.facts["simulated"]
        lines.append(
            [
                row.case,
                row.contender,
                f"{row.counts['steps'] / rounds:g}",  # type: ignore[operator]
                str(simulated["steps"]),
                f"{row.counts['accepted'] / rounds:g}",  # type: ignore[operator]
                str(simulated["accepted"]),
                f"{measured:.2f}",
                f"{expected:.2f}",
                f"{100 * (expected / measured - 1):+.0f} %",
            ]
        )
    return "measured and simulated", [*head, "speed-up", "expected", "error"], lines
