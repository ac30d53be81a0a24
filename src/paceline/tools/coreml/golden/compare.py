"""How near an artifact's numbers are to what is expected of them, and which nearness counts.

Knows arrays only: no artifact, no torch. The rule: rows (tokens) are compared one by one, and what
must not hide among others is judged apart.

- *Ordinary rows* by their cosine and by their length: a cosine does not see a factor, which the
  next norm may or may not take out again.
- *The first position* apart. It is the sink of attention: in SmolLM2-135M it is up to 168 times as
  long as other rows, by a few channels. A cosine over all rows at once would be its cosine: between
  the hidden states of layers 12 and 13 of that model it is 0.99997, row by row 0.976 (median).
- *Small rows* by the size of their error beside an ordinary row: the direction of a row next to
  zero is noise. Those are the tokens of low norm, and rows under `SMALL` of the usual length.
- *Models with experts* by the median row. A router's near tie turns by rounding as a pick's does;
  then a row goes through another expert, and is far off although nothing is wrong.
- *Picks* where they matter: a token other than the expected one counts when the expected logits
  rate it lower than their own pick by more than a margin. Rounding turns near ties.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]

SMALL = 1 / 8
"""Rows shorter than this share of the usual are judged as small ones."""

TOP = 5
"""A pick that is among so many of the others' best is called contained."""


class Rows(NamedTuple):
    """One text's rows of something, as they are and as they should be."""

    text: str
    found: Floats
    """[T, n]"""
    expected: Floats
    """[T, n]"""
    low: int | None = None
    """From which row on tokens are of low norm; None: none is."""


class Spread(NamedTuple):
    """A measure of many rows."""

    worst: float
    median: float
    at: str
    """Which row is the worst; empty where there are none."""

    def judged(self, *, experts: bool) -> float:
        """What counts."""
        return self.median if experts else self.worst


@dataclass(frozen=True, slots=True)
class Nearness:
    """How near something is, over the rows of all texts."""

    cosine: Spread
    """Of ordinary rows; -1 where a number is not finite."""
    length: Spread
    """Found by expected, of ordinary rows; the worst is the farthest from 1."""
    small: Spread
    """Errors of small rows, by the usual length."""
    first: float
    """The least cosine at a first position."""
    first_length: float
    """The expected length of a first position, by the usual one: large where it is a sink."""
    largest: float
    """The largest number found: float16 ends at 65504."""

    def faults(self, threshold: float, *, experts: bool) -> list[str]:
        """What is not near enough, in words; empty where all is."""
        allowed = allowed_error(threshold)
        cosine, length, small = (
            spread.judged(experts=experts) for spread in (self.cosine, self.length, self.small)
        )
        where = "at the median row" if experts else f"at {self.cosine.at}"
        found = []
        if cosine < threshold:
            found.append(f"cosine {cosine:.5f} {where}, expected {threshold} or more")
        if not 1 / (1 + allowed) <= length <= 1 + allowed:
            found.append(f"rows are {length:.3g} times as long as they should be")
        if self.first < threshold:
            found.append(
                f"cosine {self.first:.5f} at the first position, expected {threshold} or more"
            )
        if not small <= allowed:
            found.append(
                f"rows of low norm are off by {small:.3f} of an ordinary row's length, expected "
                f"{allowed:.3f} at most"
            )
        return found


def allowed_error(threshold: float) -> float:
    """The error, by a vector's length, that turns it until its cosine is `threshold`."""
    return sqrt(max(2 * (1 - threshold), 0.0))


def nearness(texts: Sequence[Rows]) -> Nearness:
    """Compare the rows of all texts, of which each has two or more."""
    usual = _usual(texts)
    ordinary = [_ordinary(rows) & (_lengths(rows.expected) >= SMALL * usual) for rows in texts]
    small = [~here & (np.arange(len(here)) > 0) for here in ordinary]
    each = [cosines(rows.found, rows.expected) for rows in texts]
    return Nearness(
        cosine=_spread(texts, ordinary, each, np.negative, empty=1.0),
        length=_spread(texts, ordinary, [_ratios(r) for r in texts], _from_one, empty=1.0),
        small=_spread(texts, small, [_off(r) / (usual or 1) for r in texts], np.abs, empty=0.0),
        first=float(min(cosine[0] for cosine in each)),
        first_length=max(float(_lengths(r.expected[:1])[0]) for r in texts) / (usual or 1),
        largest=float(max(np.abs(rows.found).max() for rows in texts)),
    )


def cosines(found: Floats, expected: Floats) -> npt.NDArray[np.float64]:
    """Of each row of [T, n], [T]; 1 where both rows are 0, -1 where one is not finite."""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        each = np.where(norms > 0, (a * b).sum(1) / norms, 0.0)
    each[~(a.any(1) | b.any(1))] = 1.0
    finite = np.isfinite(a).all(1) & np.isfinite(b).all(1)
    return np.where(finite, np.clip(each, -1, 1), -1.0)


def nearest(candidates: Sequence[Sequence[Rows]]) -> int:
    """Which candidate's expected rows the found ones are nearest to, by the median ordinary row.

    Each is the same texts with what another candidate expects of them.
    """
    errors = [
        _joined([_errors(r) for r in texts], [_ordinary(r) for r in texts]) for texts in candidates
    ]
    return int(np.argmin([np.median(each) for each in errors]))


def centred(logits: Floats) -> npt.NDArray[np.float64]:
    """[T, vocab] about each row's mean, which says nothing of what is picked."""
    wide = logits.astype(np.float64)
    found: npt.NDArray[np.float64] = wide - wide.mean(1, keepdims=True)
    return found


@dataclass(frozen=True, slots=True)
class Parity:
    """How often the pick is the expected one."""

    rows: int
    equal: int
    decided: int
    """Rows in which the expected logits' best is ahead of their second by more than the margin."""
    decided_equal: int
    contained: int
    """Rows in which the expected pick is among the `TOP` best found."""
    worst: float
    """How much lower than their own pick the expected logits rate the found one, at most."""
    at: str
    """In which row that is."""
    divergence: float
    """Mean Kullback-Leibler divergence of what was found from what was expected, in nats."""


def parity(texts: Sequence[Rows], margin: float) -> Parity:
    """Compare picks; `found` and `expected` are logits."""
    equal = decided = decided_equal = contained = rows = 0
    worst, at, divergence = 0.0, "", 0.0
    for text in texts:
        found, expected = text.found.astype(np.float64), text.expected.astype(np.float64)
        here = np.arange(len(found))
        picked, wanted = found.argmax(1), expected.argmax(1)
        second, best = np.partition(expected, -2, axis=1)[:, -2:].T
        lower = best - expected[here, picked]
        same, clear = picked == wanted, best - second > margin
        top = np.argpartition(found, -min(TOP, found.shape[1]), axis=1)[:, -TOP:]
        rows += len(found)
        equal += int(same.sum())
        decided += int(clear.sum())
        decided_equal += int((same & clear).sum())
        contained += int((top == wanted[:, None]).any(1).sum())
        if lower.max() > worst:
            worst, at = float(lower.max()), f"row {lower.argmax()} of {text.text}"
        divergence += float(_divergences(found, expected).sum())
    return Parity(
        rows, equal, decided, decided_equal, contained, worst, at, divergence / max(rows, 1)
    )


def difference(found: Mapping[str, Floats], expected: Mapping[str, Floats]) -> float:
    """The largest difference of any number, over all texts; inf where just one is no number."""
    worst = 0.0
    for name, theirs in expected.items():
        ours = found[name]
        differ = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
        if differ.any():
            off = float(np.abs(ours[differ].astype(np.float64) - theirs[differ]).max())
            worst = max(worst, off if np.isfinite(off) else np.inf)
    return worst


def _spread(
    texts: Sequence[Rows],
    chosen: Sequence[npt.NDArray[np.bool_]],
    values: Sequence[Floats],
    badness: Callable[[Floats], Floats],
    *,
    empty: float,
) -> Spread:
    """Of the chosen rows' values; `empty` where no row is chosen."""
    joined = _joined(values, chosen)
    if not len(joined):
        return Spread(empty, empty, "")
    worst = int(badness(joined).argmax())
    names = [
        f"row {row} of {rows.text}"
        for rows, here in zip(texts, chosen, strict=True)
        for row in np.flatnonzero(here)
    ]
    return Spread(float(joined[worst]), float(np.median(joined)), names[worst])


def _usual(texts: Sequence[Rows]) -> float:
    """The length that a row should have, usually."""
    lengths = _joined([_lengths(r.expected) for r in texts], [_ordinary(r) for r in texts])
    return float(np.median(lengths))


def _ordinary(rows: Rows) -> npt.NDArray[np.bool_]:
    """Neither the first position nor tokens of low norm."""
    here = np.arange(len(rows.expected))
    return (here > 0) & (here < (len(here) if rows.low is None else rows.low))


def _joined(values: Sequence[Floats], chosen: Sequence[npt.NDArray[np.bool_]]) -> Floats:
    return np.concatenate([each[here] for each, here in zip(values, chosen, strict=True)])


def _lengths(rows: Floats) -> Floats:
    with np.errstate(all="ignore"):
        found: Floats = np.linalg.norm(rows.astype(np.float64), axis=1)
    return found


def _off(rows: Rows) -> Floats:
    """Each row's error; large where it is not finite."""
    with np.errstate(all="ignore"):
        error = _lengths(rows.found.astype(np.float64) - rows.expected)
    return np.where(np.isfinite(error), error, _FAR)


def _ratios(rows: Rows) -> Floats:
    """Found by expected length of each row, within what a logarithm can be taken of."""
    return np.clip(_by(_lengths(rows.found), _lengths(rows.expected)), 1 / _FAR, _FAR)


def _errors(rows: Rows) -> Floats:
    """Each row's error, by the length it should have."""
    return _by(_off(rows), _lengths(rows.expected))


def _by(a: Floats, b: Floats) -> Floats:
    """A quotient: 1 of two zeros, large where it has no number."""
    with np.errstate(all="ignore"):
        found = np.where((a == 0) & (b == 0), 1.0, a / b)
    return np.where(np.isfinite(found), found, _FAR)


def _from_one(ratios: Floats) -> Floats:
    far: Floats = np.abs(np.log(ratios))
    return far


_FAR = 1e9
"""Farther than anything that is looked at."""


def _divergences(found: Floats, expected: Floats) -> Floats:
    """Of each row of logits, in nats."""
    ours, theirs = _log_shares(found), _log_shares(expected)
    each: Floats = (np.exp(theirs) * (theirs - ours)).sum(1)
    return each


def _log_shares(logits: Floats) -> Floats:
    shifted = logits - logits.max(1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return found
