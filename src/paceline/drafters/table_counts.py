"""Counts a table (`table.py`) from the target's answers.

Successors are counted after contexts of one to five tokens. A longer context is kept only if its
prediction differs from that of the shorter ones. The size limit keeps the entries that change the
most predictions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.drafters.table import (
    MAX_ORDER,
    PROBABILITY_UNITS,
    TableColumns,
    keys_at,
    token_type,
)

Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint32]
Tokens = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]

_SHORTER = 2.5
"""Weight of the shorter context per distinct successor of a context (chosen on held-out answers:
most tokens predicted correctly, at about the same mean probability)."""

_SAME = 0.15
"""A longer context that predicts the same token is dropped if its probability differs by less."""

_MISSED = 0.02
"""Probability of a token that the shorter context does not predict."""


Answers = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Token ids of prompts, which are only context and may be empty, and of their answers."""


class Entries(NamedTuple):
    """Contexts and their successors: columns of one length, sorted by key."""

    keys: Keys
    tokens: Tokens
    probabilities: Floats
    gain: Floats
    """Predictions that an entry changes, approximately."""
    is_new: npt.NDArray[np.bool_]
    """True if its prediction differs from that of shorter contexts."""

    def only(self, chosen: npt.NDArray[Any]) -> "Entries":
        """Select entries by a mask or by indices."""
        return Entries(*(column[chosen] for column in self))

    def best(self, count: int) -> "Entries":
        """Return the `count` entries with the highest gain."""
        if len(self.keys) <= count:
            return self
        by_gain = np.argsort(self.gain, kind="stable")
        return self.only(np.sort(by_gain[len(by_gain) - count :]))

    def columns(self, vocab_size: int) -> TableColumns:
        """Return the columns of a `Table` for a vocabulary of this size."""
        rounded = np.round(self.probabilities * PROBABILITY_UNITS)
        return TableColumns(
            self.keys,
            self.tokens.astype(token_type(vocab_size)),
            np.clip(rounded, 0, PROBABILITY_UNITS).astype(np.uint8),
        )


class _Text(NamedTuple):
    """Positions in all answers whose token has a context of one order."""

    keys: Keys
    """Keys of the contexts before the positions."""
    nexts: Tokens
    where: Places
    """The positions, counted over the tokens of all answers."""


class _Predictions:
    """Predictions of a table at every position of all answers, order by order."""

    def __init__(self, answers: Answers) -> None:
        places = sum(len(answer) for _, answer in answers)
        self.tokens = np.full(places, -1, np.int64)
        self.probabilities = np.zeros(places)

    def take(self, entries: Entries, text: _Text) -> None:
        """Overwrite the predictions of positions whose context is in `entries`."""
        at = np.minimum(np.searchsorted(entries.keys, text.keys), max(len(entries.keys) - 1, 0))
        if not len(entries.keys):
            return
        matches = np.flatnonzero(entries.keys[at] == text.keys)
        self.tokens[text.where[matches]] = entries.tokens[at[matches]]
        self.probabilities[text.where[matches]] = entries.probabilities[at[matches]]


def count_table(answers: Answers) -> Entries:
    """Count successors in the answers; prompts are only context."""
    predictions = _Predictions(answers)
    nothing = np.zeros(0)
    orders = [Entries(np.zeros(0, np.uint32), np.zeros(0, np.int64), nothing, nothing, nothing > 0)]
    for order in range(MAX_ORDER):
        text = _text(answers, order)
        if not len(text.keys):  # no text is long enough
            break
        entries = _count(text, predictions)
        if order:
            entries = entries.only(entries.is_new)
        predictions.take(entries, text)
        orders.append(entries)
    columns = [np.concatenate(column) for column in zip(*orders, strict=True)]
    return Entries(*columns).only(np.argsort(columns[0], kind="stable"))


def accuracy(entries: Entries, answers: Answers) -> dict[str, float]:
    """Evaluate on answers: share of tokens predicted correctly, and the mean probability."""
    predictions = _Predictions(answers)
    truth = np.concatenate([answer for _, answer in answers])
    for order in range(MAX_ORDER):
        predictions.take(entries, _text(answers, order))
    return {
        "tokens": len(truth),
        "right": float((predictions.tokens == truth).mean()),
        "promised": float(predictions.probabilities.mean()),
    }


def _text(answers: Answers, order: int) -> _Text:
    keys, nexts, where = [np.zeros(0, np.uint32)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    place = 0
    for prompt, answer in answers:
        tokens, first = np.array([*prompt, *answer], np.int64), len(prompt)
        begin = max(first, order + 1)  # the context must be complete
        keys.append(keys_at(tokens, order)[begin - order - 1 : -1])
        nexts.append(tokens[begin:])
        where.append(np.arange(begin, len(tokens)) - first + place)
        place += len(answer)
    return _Text(np.concatenate(keys), np.concatenate(nexts), np.concatenate(where))


def _count(text: _Text, predictions: _Predictions) -> Entries:
    """Make an entry per context; `predictions` are the predictions of shorter contexts.

    Probabilities are Witten-Bell's: the shorter context's weight is the number of distinct
    successors. The candidates are the most frequent successor and the shorter context's.
    """
    # Sorted by (key, token), equal pairs are runs, and the pairs of one context are adjacent.
    order = np.lexsort((text.nexts, text.keys))
    keys, nexts = text.keys[order], text.nexts[order]
    pairs = np.flatnonzero(_changes(keys) | _changes(nexts))
    counts = np.diff(pairs, append=len(keys))
    contexts = np.flatnonzero(_changes(keys[pairs]))
    totals = np.add.reduceat(counts, contexts)
    shorter = _SHORTER * np.diff(contexts, append=len(pairs))
    # Sorted by count within its context, the most frequent successor is the last.
    by_count = np.lexsort((counts, keys[pairs]))
    tops = by_count[np.append(contexts[1:], len(pairs)) - 1]
    token, top = nexts[pairs[tops]], counts[tops]
    # A context has the same suffix at every position: take any.
    place = text.where[order[pairs[contexts]]]
    predicted, prior = predictions.tokens[place], predictions.probabilities[place]
    seen = _find(keys[pairs], nexts[pairs], counts, keys[pairs[contexts]], predicted)
    shared = shorter * np.where(predicted == token, prior, _MISSED)
    probability = (top + shared) / (totals + shorter)
    repeated = (seen + shorter * prior) / (totals + shorter)
    token = np.where(repeated > probability, predicted, token)
    probability = np.maximum(repeated, probability)
    changed = np.where(predicted == token, np.abs(probability - prior), probability)
    is_new = (predicted != token) | (changed > _SAME)
    return Entries(keys[pairs[contexts]], token, probability, totals * changed, is_new)


def _find(keys: Keys, tokens: Tokens, counts: Places, contexts: Keys, successors: Tokens) -> Places:
    """Return the counts of some (key, token) among pairs sorted by both; 0 if absent."""
    width = int(tokens.max()) + 2
    pairs = keys.astype(np.int64) * width + tokens
    # A position without a prediction has token -1, which no pair has.
    queries = contexts.astype(np.int64) * width + np.where(successors < 0, width - 1, successors)
    at = np.minimum(np.searchsorted(pairs, queries), len(pairs) - 1)
    return np.where(pairs[at] == queries, counts[at], 0)


def _changes(values: Keys | Tokens) -> npt.NDArray[np.bool_]:
    """Mark values that differ from the previous one, and the first value."""
    return np.append(True, values[1:] != values[:-1])
