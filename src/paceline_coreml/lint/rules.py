"""The registry of lint rules.

A rule is a function that checks a program, a package or a whole artifact and yields faults. Its
docstring is the message for users: the fix and its reason. A decorator adds the source and the
confidence, which decides the verdict: a well-established rule fails, others warn.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, NamedTuple, TypeVar

from paceline_coreml.lint.program import Program
from paceline_coreml.rehearsal.program import MilPackage

Verdict = Literal["fail", "warn"]
Confidence = Literal["high", "medium", "low"]


class Fault(NamedTuple):
    """A place that breaks a rule."""

    where: str
    """Name of an operation, input or state; empty: the whole package."""
    what: str


class SizedPackage(NamedTuple):
    package: MilPackage
    size: int
    """Size in bytes."""


@dataclass(frozen=True, slots=True)
class Finding:
    shard: str
    """The package, or the artifact's folder if all packages together break a rule."""
    rule: str
    verdict: Verdict
    where: str
    """See `Fault`."""
    what: str
    source: str
    confidence: Confidence


_Subject = TypeVar("_Subject")


@dataclass(frozen=True, slots=True)
class LintRule(Generic[_Subject]):
    """A rule; `check` yields a fault for each place that breaks it."""

    name: str
    confidence: Confidence
    source: str
    """The origin of the measurement or documentation."""
    meaning: str
    """The fix and its reason."""
    check: Callable[[_Subject], Iterable[Fault]]

    @property
    def verdict(self) -> Verdict:
        """The verdict: only a well-established rule fails."""
        return "fail" if self.confidence == "high" else "warn"

    def findings(self, subject: _Subject, shard: str) -> Iterator[Finding]:
        for where, what in self.check(subject):
            about = self.source, self.confidence
            yield Finding(shard, self.name, self.verdict, where, what, *about)


PROGRAM_RULES: list[LintRule[Program]] = []
"""Rules about one function of a package."""
PACKAGE_RULES: list[LintRule[SizedPackage]] = []
"""Rules about a package."""
ARTIFACT_RULES: list[LintRule[Sequence[SizedPackage]]] = []
"""Rules about all packages of an artifact together, because they share a process."""

_Check = Callable[[_Subject], Iterable[Fault]]


def _rule(
    rules: list[LintRule[_Subject]], confidence: Confidence, source: str
) -> Callable[[_Check[_Subject]], _Check[_Subject]]:
    """Register a function as a rule, with its name in dashes and its docstring as meaning."""

    def register(check: _Check[_Subject]) -> _Check[_Subject]:
        name, meaning = check.__name__.replace("_", "-"), " ".join((check.__doc__ or "").split())
        rules.append(LintRule(name, confidence, source, meaning, check))
        return check

    return register


program_rule = partial(_rule, PROGRAM_RULES)
package_rule = partial(_rule, PACKAGE_RULES)
artifact_rule = partial(_rule, ARTIFACT_RULES)
