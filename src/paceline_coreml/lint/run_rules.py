"""Runs all rules on all packages of an artifact, and creates the report."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, get_args

from paceline.storage.files import size_of
from paceline.storage.report import Report
from paceline_coreml.engine.artifact import read_artifact
from paceline_coreml.lint import operations, precision, row_order, shapes, states, weights
from paceline_coreml.lint.program import Program
from paceline_coreml.lint.rules import (
    ARTIFACT_RULES,
    PACKAGE_RULES,
    PROGRAM_RULES,
    Finding,
    LintRule,
    SizedPackage,
    Verdict,
)
from paceline_coreml.rehearsal.program import read_package

PACKAGE: Final = ".mlpackage"

RULES: Final[Sequence[LintRule[Any]]] = (*PROGRAM_RULES, *PACKAGE_RULES, *ARTIFACT_RULES)
"""Every rule; the imports above register them."""

_MODULES: Final = (operations, precision, row_order, shapes, states, weights)
_VERDICTS: Final[Sequence[Verdict]] = get_args(Verdict)


def lint(path: Path) -> list[Finding]:
    """Return the findings of all rules, most severe first.

    Args:
        path: an artifact's folder, or one package (.mlpackage).

    Raises:
        ModelError: the artifact is incomplete, or a package cannot be read.
        MissingExtra: coremltools is not installed.
    """
    findings: list[Finding] = []
    packages: list[SizedPackage] = []
    for package in _packages(path):
        loaded = SizedPackage(read_package(package), size_of(package))
        packages.append(loaded)
        findings += _of_package(loaded)
    for rule in ARTIFACT_RULES:
        findings += rule.findings(packages, path.name)
    places = {loaded.package.path.name: number for number, loaded in enumerate(packages)}
    order = {rule.name: number for number, rule in enumerate(RULES)}

    def severity(finding: Finding) -> tuple[int, int, int]:
        place = places.get(finding.shard, len(places))
        return _VERDICTS.index(finding.verdict), place, order[finding.rule]

    return sorted(findings, key=severity)


def report(path: Path) -> Report:
    """Return the findings as a report, which passes unless one has the verdict "fail".

    Raises the same errors as `lint`.
    """
    findings = lint(path)
    counts = Counter(finding.verdict for finding in findings)
    passed = not counts["fail"]
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS)
    lines = [
        f"lint: {path.name} {'passes' if passed else 'does NOT pass'}: {summary}",
        *(f"{name}: {meaning}" for name, meaning in _meanings(findings)),
        "static checks only: nothing was run; only a Mac shows where an operation runs",
    ]
    value = {
        "name": path.name,
        "passed": passed,
        "counts": {verdict: counts[verdict] for verdict in _VERDICTS},
        "findings": [asdict(finding) for finding in findings],
    }
    return Report(value, passed, "\n".join(lines), [_table(findings)] if findings else [])


def _packages(path: Path) -> Sequence[Path]:
    if path.suffix == PACKAGE:
        return [path]
    artifact = read_artifact(path)
    return [path / shard.path for shard in (*artifact.layer_shards, *artifact.head_shards)]


def _of_package(loaded: SizedPackage) -> Iterator[Finding]:
    shard = loaded.package.path.name
    seen: set[Finding] = set()
    for function in loaded.package.functions.values():
        program = Program(loaded.package, function)
        for rule in PROGRAM_RULES:
            for finding in rule.findings(program, shard):
                # A package's functions are the same program for different numbers of rows.
                if finding not in seen:
                    seen.add(finding)
                    yield finding
    for package_rule in PACKAGE_RULES:
        yield from package_rule.findings(loaded, shard)


def _meanings(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    broken = {finding.rule for finding in findings}
    return ((rule.name, rule.meaning) for rule in RULES if rule.name in broken)


def _table(findings: Sequence[Finding]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Build a table row per rule and package, with the first place and the number of others."""
    rows = []
    for _, group in groupby(findings, key=attrgetter("verdict", "shard", "rule")):
        first, *more = group
        where = first.where + (f" and {len(more)} more" if more else "")
        source = f"{first.source} ({first.confidence})"
        rows.append([first.verdict, first.shard, first.rule, where, first.what, source])
    return "findings", ["verdict", "package", "rule", "where", "what", "source"], rows
