"""Which answers of a corpus are learnt from, and which are held out.

Left out are conversations that begin like an earlier one, those whose user asks what a benchmark
asks, and answers that were loops. Independent of networks; numpy on the host.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from conversations import ANSWER, USER, Corpus

UNSEEN = 8
"""Tokens in a row that no user's message may share with a benchmark's question."""
SHORTEST = 8
"""Tokens of an answer."""
HELD_OUT = 50
"""One conversation in this many is held out."""

Integers = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


class Spans(NamedTuple):
    """Answers as places in a corpus; all [answers]."""

    begins: Integers
    ends: Integers
    conversations: Integers
    """Numbers of their conversations."""

    @property
    def lengths(self) -> Integers:
        """Tokens of each."""
        return self.ends - self.begins

    def only(self, chosen: npt.NDArray[np.bool_]) -> "Spans":
        """Those of a mask."""
        return Spans(*(column[chosen] for column in self))


def select(corpus: Corpus, unseen: Iterable[Sequence[int]]) -> tuple[Spans, Spans]:
    """Answers to learn from, and those held out. `unseen`: token ids of benchmarks' questions."""
    tokens, kinds = corpus.tokens.cpu().numpy(), corpus.kinds.cpu().numpy()
    lengths = np.array(corpus.lengths, np.int64)
    spans = answers_of(kinds, lengths)
    fit = ~(_repeated(tokens, kinds, lengths) | _seen(tokens, kinds, lengths, unseen))
    chosen = spans.only(fit[spans.conversations] & (spans.lengths >= SHORTEST))
    held_out = chosen.conversations % HELD_OUT == 0
    return chosen.only(~held_out), chosen.only(held_out)


def answers_of(kinds: npt.NDArray[np.uint8], lengths: Integers) -> Spans:
    """All answers that are no loops. `kinds` [tokens], `lengths` [conversations]."""
    # The template is between two answers, and no conversation begins with one.
    edges = np.diff((kinds == ANSWER).astype(np.int8), prepend=0, append=0)
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return Spans(begins, ends, np.searchsorted(np.cumsum(lengths), begins, side="right"))


def _repeated(
    tokens: Tokens, kinds: npt.NDArray[np.uint8], lengths: Integers
) -> npt.NDArray[np.bool_]:
    """[conversations]: True for one whose first message was there before."""
    known: set[bytes] = set()
    repeated = np.zeros(len(lengths), bool)
    ends = np.cumsum(lengths)
    for number, (begin, end) in enumerate(zip(ends - lengths, ends, strict=True)):
        answer = np.flatnonzero(kinds[begin:end] > USER)  # a loop, too
        message = tokens[begin : begin + answer[0] if len(answer) else end].tobytes()
        repeated[number] = message in known
        known.add(message)
    return repeated


def _seen(
    tokens: Tokens,
    kinds: npt.NDArray[np.uint8],
    lengths: Integers,
    unseen: Iterable[Sequence[int]],
) -> npt.NDArray[np.bool_]:
    """[conversations]: True for one whose user says what must stay unseen."""
    runs = np.unique(np.concatenate([_hashes(question) for question in unseen]))
    is_shared = np.isin(_hashes(tokens), runs)
    # A run is the user's if both ends are: no message is as short as what is between two.
    is_user = kinds == USER
    count = len(is_shared)
    shared = np.flatnonzero(is_shared & is_user[:count] & is_user[UNSEEN - 1 :][:count])
    seen = np.zeros(len(lengths), bool)
    seen[np.searchsorted(np.cumsum(lengths), shared, side="right")] = True
    return seen


def _hashes(tokens: Sequence[int] | Tokens) -> Integers:
    """A hash of each run of `UNSEEN` tokens, [tokens - UNSEEN + 1]."""
    ids = np.asarray(tokens, np.int64)
    hashes = np.zeros(max(len(ids) - UNSEEN + 1, 0), np.int64)
    for place in range(UNSEEN):
        hashes = hashes * 1_000_003 + ids[place : place + len(hashes)]
    return hashes
