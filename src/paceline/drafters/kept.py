"""Drafts from the target's answer history, saved on this machine.

Two forms of the same answers: a table of successors (`table.py`) for similar text, and the text
itself: where eight consecutive tokens have occurred before, the same continuation is proposed.
`runtime/kept.py` saves the answers and has them counted; this module looks them up.
"""

import io
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.decoding.types import Drafter, Proposal
from paceline.drafters.suffix import Match
from paceline.drafters.table import (
    Table,
    TableColumns,
    TableDrafter,
    keys_at,
    keys_of,
    token_type,
)
from paceline.drafters.table_counts import count_table
from paceline.errors import ModelError
from paceline.storage.files import write_bytes

_FORM = "paceline kept counts 2"

MATCH = 8
"""Consecutive tokens looked up in the text (docs/decisions/kept-answers.md)."""

_LONGEST = 24
"""Longer matches are not better evidence: the policy has one estimate for all of them."""

_FIRST = 1000
"""Answers are first counted when they have this many tokens."""

_GROWTH = 8
"""Answers are recounted when 1 / this of them is new: counting takes microseconds per token."""


class KeptText:
    """Counted answers; one serves all requests of a process."""

    def __init__(self, columns: Mapping[str, Any], vocab_size: int) -> None:
        """Look up in these columns, made by `count` or `open`."""
        self._columns, self._end = columns, vocab_size
        self.table = Table(TableColumns(*(columns[name] for name in TableColumns._fields)))
        self._text = memoryview(columns["text"])
        self._keys = memoryview(columns["match_keys"])
        self._matches = memoryview(columns["matches"])

    @classmethod
    def count(cls, answers: Sequence[Sequence[int]], vocab_size: int) -> "KeptText":
        """Count answers, oldest first: about four microseconds a token."""
        table = count_table([((), answer) for answer in answers]).columns(vocab_size)
        # A token that the vocabulary lacks ends every answer: no match and no proposal crosses it.
        ended = [np.array([*answer, vocab_size], np.int64) for answer in answers]
        text = np.concatenate([np.empty(0, np.int64), *ended])
        places = np.arange(len(text))
        ends = np.where(text == vocab_size, places, -1)
        latest_end = np.maximum.accumulate(ends) if len(text) else ends
        keys = keys_at(text, MATCH - 1)
        starts = np.flatnonzero(places[MATCH - 1 :] - latest_end[MATCH - 1 :] >= MATCH)
        starts = starts[text[starts + MATCH] != vocab_size]
        order = starts[np.argsort(keys[starts], kind="stable")]
        is_latest = np.append(keys[order][1:] != keys[order][:-1], True)[: len(order)]
        latest = order[is_latest]
        return cls(
            {
                **table._asdict(),
                "text": text.astype(token_type(vocab_size + 1)),
                "match_keys": keys[latest],
                "matches": (latest + MATCH).astype(np.uint32),
            },
            vocab_size,
        )

    @classmethod
    def open(cls, path: Path, fingerprint: str, vocab_size: int) -> tuple["KeptText", int]:
        """Open a file that `write` wrote; return also the size of the log that was counted.

        Raises ModelError if it belongs to another model or version, or is damaged (numpy's archives
        have checksums), and OSError.
        """
        try:
            with np.load(path) as file:
                columns = {name: file[name] for name in file.files}
            identity, log_bytes = columns.pop("identity").tolist(), int(columns.pop("log_bytes"))
        except OSError:
            raise
        except Exception as error:  # numpy does not document its errors for damaged files
            raise ModelError(f"{path} is damaged; expected counts of saved answers") from error
        if identity != _identity(fingerprint, vocab_size):
            raise ModelError(f"{path} has counts of another model's answers, or another version")
        return cls(columns, vocab_size), log_bytes

    def write(self, path: Path, fingerprint: str, log_bytes: int) -> None:
        """Write all columns to one file; `fingerprint` is that of the model. Raises OSError."""
        content, identity = io.BytesIO(), np.array(_identity(fingerprint, self._end))
        np.savez(content, identity=identity, log_bytes=np.array(log_bytes), **self._columns)
        write_bytes(path, content.getvalue())

    def match(self, context: Sequence[int]) -> Match | None:
        """Return the latest place in the text where the last `MATCH` tokens of `context` occur."""
        if len(context) < MATCH:
            return None
        key = keys_of(context[-MATCH:], MATCH)[-1]
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            return None
        next_at = self._matches[at]
        length = 0
        for back in range(1, min(_LONGEST, next_at, len(context)) + 1):
            if self._text[next_at - back] != context[-back]:
                break
            length = back
        return Match(length, next_at) if length >= MATCH else None  # else hashes collided

    def continuation(self, match: Match, limit: int) -> list[int]:
        """Return up to `limit` tokens that followed a match; none if the answer ended there."""
        tokens: list[int] = self._text[match.next_at : match.next_at + limit].tolist()
        return tokens[: tokens.index(self._end)] if self._end in tokens else tokens


class KeptDrafter(Drafter):
    """Proposes the text that followed the same eight tokens, or the most frequent successors."""

    name = "kept"

    def __init__(self, kept: KeptText) -> None:
        self._kept = kept
        self._table = TableDrafter(kept.table, self.name)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        match = self._kept.match(context)
        tokens = [] if match is None else self._kept.continuation(match, limit)
        if match is not None and tokens:
            return Proposal(tokens, "kept text", match.length)
        return self._table.propose(context, limit)


def _identity(fingerprint: str, vocab_size: int) -> list[str]:
    return [_FORM, fingerprint, str(vocab_size)]


def due(tokens: float, counted: float) -> bool:
    """Return whether `tokens` tokens of answers must be recounted, given the `counted` ones."""
    return tokens - counted >= max(_FIRST, counted / _GROWTH)
