"""Counting a table (`drafters/table.py`) from the target's answers.

Successors are counted after one to five tokens. A longer context is kept only where it says
something else than the shorter ones would, and where there is no room for all that do, the entries
that change most guesses stay.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import paceline
from paceline.drafters.table import (
    KEYS,
    KIND,
    MAX_ORDER,
    PROBABILITIES,
    PROBABILITY_UNITS,
    TOKENS,
    keys_at,
    token_type,
)
from paceline.storage.files import writing
from paceline.storage.manifest import begin_artifact, write_manifest
from paceline.tools.train.answers import Answer

Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint32]
Tokens = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]

_SHORTER = 2.5
"""Weight of the shorter context for each different successor a context has had (held-out answers
chose it: names most tokens right, and promises about as many as it names)."""

_SAME = 0.15
"""A longer context that says the same token is left out when its chance differs by less."""

_MISSED = 0.02
"""The chance of a token that the shorter context does not name."""


class Entries(NamedTuple):
    """Contexts and their successors: columns of one length, sorted by key."""

    keys: Keys
    tokens: Tokens
    chances: Floats
    worth: Floats
    """How many guesses of the text an entry changes, more or less."""
    news: npt.NDArray[np.bool_]
    """Whether it says something else than shorter contexts do."""

    def only(self, chosen: npt.NDArray[Any]) -> "Entries":
        """Some of the entries: a mask, or places."""
        return Entries(*(column[chosen] for column in self))

    def best(self, count: int) -> "Entries":
        """The `count` entries of most worth."""
        if len(self.keys) <= count:
            return self
        by_worth = np.argsort(self.worth, kind="stable")
        return self.only(np.sort(by_worth[len(by_worth) - count :]))


class _Text(NamedTuple):
    """The places of one order in all answers: where tokens are to be guessed."""

    keys: Keys
    """Of the context before each place."""
    nexts: Tokens
    """The token at each place."""
    where: Places
    """Which place it is, counted through all answers' tokens."""


class _Guesses:
    """What a table says at every place of all answers, as its orders are added."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        places = sum(len(answer.answer) for answer in answers)
        self.tokens = np.full(places, -1, np.int64)
        self.chances = np.zeros(places)

    def take(self, entries: Entries, text: _Text) -> None:
        """Let `entries` say what they know of places that were looked up with these keys."""
        at = np.minimum(np.searchsorted(entries.keys, text.keys), max(len(entries.keys) - 1, 0))
        if not len(entries.keys):
            return
        found = np.flatnonzero(entries.keys[at] == text.keys)
        self.tokens[text.where[found]] = entries.tokens[at[found]]
        self.chances[text.where[found]] = entries.chances[at[found]]


def count_table(answers: Sequence[Answer]) -> Entries:
    """Count what follows what in the answers; prompts are only context."""
    guesses = _Guesses(answers)
    orders = []
    for order in range(MAX_ORDER):
        text = _text(answers, order)
        if not len(text.keys):  # no text is long enough
            break
        entries = _count(text, guesses)
        if order:
            entries = entries.only(entries.news)
        guesses.take(entries, text)
        orders.append(entries)
    return _merged(orders)


def accuracy(entries: Entries, answers: Sequence[Answer]) -> dict[str, float]:
    """How a table does on answers: the share of tokens it names, and the mean chance it gives."""
    guesses = _Guesses(answers)
    truth = np.concatenate([answer.answer for answer in answers])
    for order in range(MAX_ORDER):
        guesses.take(entries, _text(answers, order))
    return {
        "tokens": len(truth),
        "right": float((guesses.tokens == truth).mean()),
        "promised": float(guesses.chances.mean()),
    }


def write_table(
    entries: Entries, folder: Path, *, target: str, vocab_size: int, facts: dict[str, Any]
) -> None:
    """Write a table's folder; `facts` say what it was made from."""
    begin_artifact(folder, KIND)
    chances = np.clip(np.round(entries.chances * PROBABILITY_UNITS), 0, PROBABILITY_UNITS)
    about = {
        "made_by": f"paceline {paceline.__version__}",
        "target": target,
        "vocab_size": vocab_size,
        "entries": len(entries.keys),
        **facts,
    }
    columns = {
        KEYS: entries.keys,
        TOKENS: entries.tokens.astype(token_type(vocab_size)),
        PROBABILITIES: chances.astype(np.uint8),
    }
    with writing(folder):
        # A running process may have the old ones mapped: they are replaced, never written into.
        for name, column in columns.items():
            np.save(folder / f".{name}", column)
            (folder / f".{name}").replace(folder / name)
        write_manifest(folder, KIND, about, columns)


def _text(answers: Sequence[Answer], order: int) -> _Text:
    keys, nexts, where = [], [], []
    place = 0
    if not answers:
        return _Text(np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    for answer in answers:
        tokens, first = np.array(answer.tokens, np.int64), len(answer.prompt)
        begin = max(first, order + 1)  # the context must be there in full
        keys.append(keys_at(tokens, order)[begin - order - 1 : -1])
        nexts.append(tokens[begin:])
        where.append(np.arange(begin, len(tokens)) - first + place)
        place += len(answer.answer)
    return _Text(np.concatenate(keys), np.concatenate(nexts), np.concatenate(where))


def _count(text: _Text, guesses: _Guesses) -> Entries:
    """An entry for each context, where `guesses` are what shorter contexts say.

    Chances are Witten-Bell's: the shorter context weighs as much as the context has had different
    successors. Two tokens stand to be named, the most frequent one and the shorter context's.
    """
    # Sorted by (key, token), equal pairs are runs, and the pairs of one context are neighbours.
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
    # A context's shorter endings are the same wherever it stands: any place will do.
    place = text.where[order[pairs[contexts]]]
    said, believed = guesses.tokens[place], guesses.chances[place]
    seen = _find(keys[pairs], nexts[pairs], counts, keys[pairs[contexts]], said)
    chance = (top + shorter * np.where(said == token, believed, _MISSED)) / (totals + shorter)
    stays = (seen + shorter * believed) / (totals + shorter)
    token, chance = np.where(stays > chance, said, token), np.maximum(stays, chance)
    changed = np.where(said == token, np.abs(chance - believed), chance)
    news = (said != token) | (changed > _SAME)
    return Entries(keys[pairs[contexts]], token, chance, totals * changed, news)


def _find(keys: Keys, tokens: Tokens, counts: Places, wanted: Keys, successors: Tokens) -> Places:
    """How often each of some (key, token) was counted, among pairs sorted by both."""
    width = int(tokens.max()) + 2
    known = keys.astype(np.int64) * width + tokens
    # The token -1 of a place where nothing is said is nobody's.
    sought = wanted.astype(np.int64) * width + np.where(successors < 0, width - 1, successors)
    at = np.minimum(np.searchsorted(known, sought), len(known) - 1)
    return np.where(known[at] == sought, counts[at], 0)


def _changes(values: Keys | Tokens) -> npt.NDArray[np.bool_]:
    """Where a value differs from the one before it; the first does."""
    return np.append(True, values[1:] != values[:-1])


def _merged(orders: Sequence[Entries]) -> Entries:
    if not orders:
        nothing = np.zeros(0)
        return Entries(
            nothing.astype(np.uint32), nothing.astype(np.int64), nothing, nothing, nothing > 0
        )
    columns = [np.concatenate(column) for column in zip(*orders, strict=True)]
    return Entries(*columns).only(np.argsort(columns[0], kind="stable"))
