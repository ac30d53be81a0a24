"""What a verification has found so far, kept beside its output, so that a stopped one goes on.

Each entry of the journal is for good when the call that adds it returns: all comparisons of rows
together, each plain answer, each case. Another verification's journal is not gone on with.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import InvalidRequest
from paceline.storage.json_lines import Append, appending, read_journal
from paceline.tools.bench.journal import check_same, journal_path


class CaseFound(NamedTuple):
    """What came of one case."""

    answers: int
    tokens: int
    differing: list[str]


class VerifyJournal:
    """What is done; and more, as it gets done."""

    def __init__(self, append: Append) -> None:
        self._append = append
        self.rows: dict[str, Any] | None = None
        """What comparing rows found, as JSON; None while that has not been done."""
        self._plain: dict[tuple[int, str], list[int]] = {}
        self._cases: dict[int, CaseFound] = {}

    def add_rows(self, found: dict[str, Any]) -> None:
        """Keep what comparing rows found."""
        self._append({"rows": found})
        self.rows = found

    def plain(self, prompt: int, sampling: str) -> list[int] | None:
        """Plain decoding's tokens for a prompt; None where they are not known."""
        return self._plain.get((prompt, sampling))

    def add_plain(self, prompt: int, sampling: str, tokens: list[int]) -> list[int]:
        """Keep plain decoding's tokens for a prompt."""
        self._append({"plain": [prompt, sampling], "token_ids": tokens})
        self._plain[prompt, sampling] = tokens
        return tokens

    def case(self, number: int) -> CaseFound | None:
        """What came of a case; None where it has not been checked."""
        return self._cases.get(number)

    def add_case(self, number: int, found: CaseFound) -> CaseFound:
        """Keep what came of a case."""
        self._append({"case": number, **found._asdict()})
        self._cases[number] = found
        return found

    def read(self, entry: Mapping[str, Any]) -> bool:
        """Take in an entry of the journal; False if it is none."""
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
                self._cases[number] = CaseFound(answers, count, list(differing))
            case _:
                return False
        return True


@contextlib.contextmanager
def verifying(output: Path | None, about: Mapping[str, Any]) -> Iterator[VerifyJournal]:
    """What an interrupted verification for `output` has found, and a place for more.

    Args:
        output: where the result will be written; None: nothing is kept on disk.
        about: what is verified, how and where; JSON.

    Raises:
        InvalidRequest: the journal cannot be read or written, or is that of another verification.
    """
    path = journal_path(output)
    if path is None:
        yield VerifyJournal(lambda _: None)
        return
    entries = read_journal(path, {})
    with appending(path) as append:
        kept = VerifyJournal(append)
        if entries:
            check_same(path, entries[0].get("about"), about)
        else:
            append({"about": dict(about)})
        for number, entry in enumerate(entries[1:], start=2):
            if not kept.read(entry):
                raise InvalidRequest(
                    f"line {number} of {path} is no part of a verification; remove the file"
                )
        yield kept
