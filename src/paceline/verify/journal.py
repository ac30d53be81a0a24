"""Journal of a verification, beside its output, so that an interrupted one can be resumed.

Its entries: one of the row comparisons, one per plain answer, and one per case. An entry is on
disk when the call that adds it returns.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import InvalidRequest
from paceline.storage.json_lines import Append, journal_path, resuming


class CaseResult(NamedTuple):
    """Answers and tokens compared in one case, and a line per answer that differed."""

    answers: int
    tokens: int
    differing: list[str]


class VerifyJournal:
    """Results so far."""

    def __init__(self, append: Append) -> None:
        self._append = append
        self.rows: dict[str, Any] | None = None
        """Row comparisons by condition, as JSON; None if they have not been done."""
        self._plain: dict[tuple[int, str], list[int]] = {}
        self._cases: dict[int, CaseResult] = {}

    def add_rows(self, rows: dict[str, Any]) -> None:
        """Add the row comparisons."""
        self._append({"rows": rows})
        self.rows = rows

    def plain(self, prompt: int, sampling: str) -> list[int] | None:
        """Plain decoding's tokens for a prompt; None if it has not been answered."""
        return self._plain.get((prompt, sampling))

    def add_plain(self, prompt: int, sampling: str, tokens: list[int]) -> list[int]:
        """Add plain decoding's tokens for a prompt."""
        self._append({"plain": [prompt, sampling], "token_ids": tokens})
        self._plain[prompt, sampling] = tokens
        return tokens

    def case(self, number: int) -> CaseResult | None:
        """Result of a case; None if it has not been checked."""
        return self._cases.get(number)

    def add_case(self, number: int, result: CaseResult) -> CaseResult:
        """Add the result of a case."""
        self._append({"case": number, **result._asdict()})
        self._cases[number] = result
        return result

    def read(self, entry: Mapping[str, Any]) -> bool:
        """Add an entry of the file; False if it is not an entry of a verification."""
        match entry:
            case {"rows": dict(rows)}:
                self.rows = rows
            case {"plain": [int(prompt), str(sampling)], "token_ids": [*tokens]}:
                self._plain[prompt, sampling] = list(tokens)
            case {
                "case": int(number),
                "answers": int(answers),
                "tokens": int(count),
                "differing": [*differing],
            }:
                self._cases[number] = CaseResult(answers, count, list(differing))
            case _:
                return False
        return True


@contextlib.contextmanager
def open_verify_journal(output: Path | None, about: Mapping[str, Any]) -> Iterator[VerifyJournal]:
    """Open the journal of `output`, with the results of an interrupted verification, if any.

    `about` describes the verification: see `resuming`. Raises InvalidRequest if the journal cannot
    be read or written, or is another verification's.
    """
    with resuming(output, about) as (entries, append):
        journal = VerifyJournal(append)
        for number, entry in entries:
            if not journal.read(entry):
                raise InvalidRequest(
                    f"line {number} of {journal_path(output)} is no part of a verification; remove "
                    "the file"
                )
        yield journal
