"""Runs all rules on all packages of an artifact, and creates the report."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Final

from paceline.storage.report import Report
from paceline_coreml.engine.artifact import read_artifact
from paceline_coreml.lint import operations, precision, row_order, shapes, states, weights
from paceline_coreml.lint.program import Program
from paceline_coreml.lint.rules import ARTIFACT_RULES, PROGRAM_RULES, Finding, LintRule
from paceline_coreml.rehearsal.program import MilPackage, read_package

PACKAGE: Final = ".mlpackage"

RULES: Final[Sequence[LintRule]] = (*PROGRAM_RULES, *ARTIFACT_RULES)
"""Every rule; the imports above register them."""

_MODULES: Final = (operations, precision, row_order, shapes, states, weights)


def lint(path: Path) -> list[Finding]:
    """Return the findings of all rules about an artifact or one package, most severe first.

    Raises:
        ModelError: the artifact is incomplete, or a package cannot be read.
        MissingExtra: coremltools is not installed.
    """
    packages = [read_package(package) for package in _packages(path)]
    # A package's functions are the same program for different numbers of rows.
    findings = dict.fromkeys(finding for package in packages for finding in _findings(package))
    for rule in ARTIFACT_RULES:
        findings |= dict.fromkeys(rule.findings(packages, path.name))
    return sorted(findings, key=attrgetter("verdict"))  # "fail" before "warn"


def report(path: Path) -> Report:
    """Return the findings as a report, which passes unless one has the verdict "fail".

    Raises the same errors as `lint`.
    """
    findings = lint(path)
    counts = Counter(finding.verdict for finding in findings)
    passed = not counts["fail"]
    broken = {finding.rule for finding in findings}
    lines = [
        f"lint: {path.name} {'passes' if passed else 'does NOT pass'}: {counts['fail']} fail, "
        f"{counts['warn']} warn",
        *(f"{rule.name}: {rule.meaning}" for rule in RULES if rule.name in broken),
        "static checks only: nothing was run; only a Mac shows where an operation runs",
    ]
    value = {
        "name": path.name,
        "passed": passed,
        "counts": {verdict: counts[verdict] for verdict in ("fail", "warn")},
        "findings": [asdict(finding) for finding in findings],
    }
    return Report(value, passed, "\n".join(lines), [_table(findings)] if findings else [])


def _packages(path: Path) -> Sequence[Path]:
    if path.suffix == PACKAGE:
        return [path]
    artifact = read_artifact(path)
    return [path / shard.path for shard in (*artifact.layer_shards, *artifact.head_shards)]


def _findings(package: MilPackage) -> Iterator[Finding]:
    programs = [Program(package, function) for function in package.functions.values()]
    for rule in PROGRAM_RULES:
        for program in programs:
            yield from rule.findings(program, package.path.name)


def _table(findings: Sequence[Finding]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Build a table row per rule and package, with the first place and the number of others."""
    rows = []
    for _, group in groupby(findings, key=attrgetter("verdict", "shard", "rule")):
        first, *more = group
        where = first.where + (f" and {len(more)} more" if more else "")
        source = f"{first.source} ({first.confidence})"
        rows.append([first.verdict, first.shard, first.rule, where, first.what, source])
    return "findings", ["verdict", "package", "rule", "where", "what", "source"], rows
