"""The registry of lint rules.

A rule is a function that checks a program, or a whole artifact, and yields faults. Its
docstring is the message for users: the fix and its reason. A decorator adds the source and the
confidence, which decides the verdict: a well-established rule fails, others warn.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Verdict = Literal["fail", "warn"]
Confidence = Literal["high", "medium", "low"]


class Fault(NamedTuple):
    """A place that breaks a rule."""

    where: str
    """Name of an operation, input or state; empty: the whole package."""
    what: str


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


@dataclass(frozen=True, slots=True)
class LintRule:
    """A rule; `check` yields a fault for each place that breaks it."""

    name: str
    confidence: Confidence
    source: str
    """The origin of the measurement or documentation."""
    meaning: str
    """The fix and its reason."""
    check: Callable[[Any], Iterable[Fault]]

    def findings(self, subject: Any, shard: str) -> Iterator[Finding]:
        # Only a well-established rule fails.
        verdict: Verdict = "fail" if self.confidence == "high" else "warn"
        for where, what in self.check(subject):
            yield Finding(shard, self.name, verdict, where, what, self.source, self.confidence)


PROGRAM_RULES: list[LintRule] = []
"""Rules about a `Program`: one function of a package."""
ARTIFACT_RULES: list[LintRule] = []
"""Rules about all packages of an artifact together, because they share a process."""

_Check = Callable[[Any], Iterable[Fault]]


def program_rule(
    confidence: Confidence, source: str, *, rules: list[LintRule] = PROGRAM_RULES
) -> Callable[[_Check], _Check]:
    """Register a function as a rule, with its name in dashes and its docstring as meaning."""

    def register(check: _Check) -> _Check:
        name, meaning = check.__name__.replace("_", "-"), " ".join((check.__doc__ or "").split())
        rules.append(LintRule(name, confidence, source, meaning, check))
        return check

    return register
