"""What a rule is, and what it finds. Knows no rule in particular.

A rule is a function that looks at a program, a package or a whole artifact and yields faults. Its
docstring says what the fault means; its entry here says who found out, and how sure that is. The
verdict follows from that: what is firm fails, the rest warns, and what is no fault but worth
knowing informs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

from paceline.engines.coreml.rehearsal.program import Package
from paceline.tools.coreml.lint.program import Program

Verdict = Literal["fail", "warn", "info"]
Confidence = Literal["high", "medium", "low"]


class Fault(NamedTuple):
    """Where a rule is broken."""

    where: str
    """An operation, an input or a state by its name; empty: all of it."""
    what: str


class Loaded(NamedTuple):
    """A package, and what it takes on disk."""

    package: Package
    size: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that is broken somewhere."""

    shard: str
    """The package; the artifact's folder where all packages together break a rule."""
    rule: str
    verdict: Verdict
    where: str
    """An operation, an input or a state by its name; empty: all of it."""
    what: str
    source: str
    confidence: Confidence


_About = TypeVar("_About")


@dataclass(frozen=True, slots=True)
class Rule(Generic[_About]):
    """One rule; `check` yields a fault for every place that breaks it."""

    name: str
    verdict: Verdict
    confidence: Confidence
    source: str
    """Who found out."""
    meaning: str
    """What is wrong, and what to do."""
    check: Callable[[_About], Iterable[Fault]]

    def findings(self, about: _About, shard: str) -> Iterator[Finding]:
        """What `check` finds, in a shard."""
        for fault in self.check(about):
            yield Finding(
                shard,
                self.name,
                self.verdict,
                fault.where,
                fault.what,
                self.source,
                self.confidence,
            )


PROGRAM_RULES: list[Rule[Program]] = []
"""Rules about one function of a package."""
PACKAGE_RULES: list[Rule[Loaded]] = []
"""Rules about a package."""
ARTIFACT_RULES: list[Rule[Sequence[Loaded]]] = []
"""Rules about all packages of an artifact together: they share a process."""

_Check = Callable[[_About], Iterable[Fault]]


def rule(
    rules: list[Rule[_About]],
    name: str,
    verdict: Verdict,
    confidence: Confidence,
    source: str,
) -> Callable[[_Check[_About]], _Check[_About]]:
    """Enter a function as a rule; its docstring is the meaning."""

    def enter(check: _Check[_About]) -> _Check[_About]:
        meaning = " ".join((check.__doc__ or "").split())
        rules.append(Rule(name, verdict, confidence, source, meaning, check))
        return check

    return enter


def bytes_of(folder: Path) -> int:
    """What the files of a package take."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
