"""Compares an artifact's arrays with the expected ones, row by row, and defines the criteria.

Works on arrays only: no artifact, no torch. Rows (tokens) with a property of their own have their
own criterion, so that they neither hide nor cause faults:

- *Ordinary rows*: cosine and length. A cosine does not show a factor, which the next norm may or
  may not remove.
- *The first position*: its own cosine. It is the attention sink: in SmolLM2-135M it is up to 168
  times as long as other rows, by a few channels, and would dominate a cosine over all rows: between
  the hidden states of layers 12 and 13 of that model that is 0.99997, row by row 0.976 (median).
- *Small rows*: error relative to an ordinary row, because the direction of a row near zero is
  noise. These are tokens of low norm, and rows under `SMALL` of the median length.
- *Models with experts*: the median row. Rounding flips near ties of a router; the row then goes
  through another expert, and differs without a fault.
- *Top tokens*: a different one counts if the expected logits rate it lower than their own by more
  than a margin. Rounding flips near ties.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]

SMALL = 1 / 8
"""Rows shorter than this fraction of the median length are small."""

TOP = 5
"""An expected top token among this number of best ones counts as contained."""


class RowPairs(NamedTuple):
    """One text's rows, found and expected."""

    text: str
    found: Floats
    """[T, n]"""
    expected: Floats
    """[T, n]"""
    low: int | None = None
    """The first row with a token of low norm; None: there is none."""


class Summary(NamedTuple):
    """A measure over rows."""

    worst: float
    median: float
    at: str
    """The worst row; empty if there are no rows."""

    def criterion(self, *, experts: bool) -> float:
        """The value that is compared with a limit."""
        return self.median if experts else self.worst


@dataclass(frozen=True, slots=True)
class Nearness:
    """The comparison of an output over the rows of all texts."""

    cosine: Summary
    """Of ordinary rows; -1 if an element is not finite."""
    length: Summary
    """Found / expected, of ordinary rows; the worst is the farthest from 1."""
    small: Summary
    """Errors of small rows / the median length."""
    first: float
    """Minimum cosine at a first position."""
    first_length: float
    """Expected length of a first position / the median length: large for an attention sink."""
    largest: float
    """The largest magnitude found; float16's maximum is 65504."""

    def faults(self, threshold: float, *, experts: bool) -> list[str]:
        """Faults as messages."""
        allowed = allowed_error(threshold)
        cosine, length, small = (
            one.criterion(experts=experts) for one in (self.cosine, self.length, self.small)
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
    """The relative error of a vector whose cosine is `threshold`."""
    return sqrt(max(2 * (1 - threshold), 0.0))


def nearness(texts: Sequence[RowPairs]) -> Nearness:
    """Compare the rows of all texts, which have two rows or more each."""
    typical = _median_length(texts)
    ordinary = [_ordinary(rows) & (_lengths(rows.expected) >= SMALL * typical) for rows in texts]
    small = [~here & (np.arange(len(here)) > 0) for here in ordinary]
    each = [cosines(rows.found, rows.expected) for rows in texts]
    return Nearness(
        cosine=_summary(texts, ordinary, each, np.negative, empty=1.0),
        length=_summary(texts, ordinary, [_ratios(r) for r in texts], _log_distance, empty=1.0),
        small=_summary(
            texts, small, [_row_errors(r) / (typical or 1) for r in texts], np.abs, empty=0.0
        ),
        first=float(min(cosine[0] for cosine in each)),
        first_length=max(float(_lengths(r.expected[:1])[0]) for r in texts) / (typical or 1),
        largest=float(max(np.abs(rows.found).max() for rows in texts)),
    )


def cosines(found: Floats, expected: Floats) -> npt.NDArray[np.float64]:
    """[T, n] twice -> cosine of each row [T]: 1 if both are 0, -1 if one is not finite."""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        each = np.where(norms > 0, (a * b).sum(1) / norms, 0.0)
    each[~(a.any(1) | b.any(1))] = 1.0
    finite = np.isfinite(a).all(1) & np.isfinite(b).all(1)
    return np.where(finite, np.clip(each, -1, 1), -1.0)


def nearest(candidates: Sequence[Sequence[RowPairs]]) -> int:
    """Index of the candidate with the smallest median error of ordinary rows.

    Each candidate has the same found rows, and its own expected rows.
    """
    errors = [
        _selected([_relative_errors(r) for r in texts], [_ordinary(r) for r in texts])
        for texts in candidates
    ]
    return int(np.argmin([np.median(each) for each in errors]))


def centred(logits: Floats) -> npt.NDArray[np.float64]:
    """[T, vocab] minus each row's mean, which does not change the top token."""
    wide = logits.astype(np.float64)
    found: npt.NDArray[np.float64] = wide - wide.mean(1, keepdims=True)
    return found


@dataclass(frozen=True, slots=True)
class Parity:
    """Agreement of top tokens."""

    rows: int
    equal: int
    decided: int
    """Rows whose two best expected logits differ by more than the margin."""
    decided_equal: int
    contained: int
    """Rows whose expected top token is among the `TOP` best found."""
    worst: float
    """Maximum by which the expected logits rate the found top token below their own, in nats."""
    at: str
    """The row of `worst`."""
    divergence: float
    """Mean KL divergence of the found from the expected distribution, in nats."""


def parity(texts: Sequence[RowPairs], margin: float) -> Parity:
    """Compare top tokens; `found` and `expected` are logits."""
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
        divergence += float(_kl_divergences(found, expected).sum())
    return Parity(
        rows, equal, decided, decided_equal, contained, worst, at, divergence / max(rows, 1)
    )


def difference(found: Mapping[str, Floats], expected: Mapping[str, Floats]) -> float:
    """The largest absolute difference over all texts; inf if only one element is NaN."""
    worst = 0.0
    for name, theirs in expected.items():
        ours = found[name]
        differ = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
        if differ.any():
            off = float(np.abs(ours[differ].astype(np.float64) - theirs[differ]).max())
            worst = max(worst, off if np.isfinite(off) else np.inf)
    return worst


def _summary(
    texts: Sequence[RowPairs],
    chosen: Sequence[npt.NDArray[np.bool_]],
    values: Sequence[Floats],
    badness: Callable[[Floats], Floats],
    *,
    empty: float,
) -> Summary:
    """Summarize the chosen rows' values; `empty` if no row is chosen."""
    joined = _selected(values, chosen)
    if not len(joined):
        return Summary(empty, empty, "")
    worst = int(badness(joined).argmax())
    names = [
        f"row {row} of {rows.text}"
        for rows, here in zip(texts, chosen, strict=True)
        for row in np.flatnonzero(here)
    ]
    return Summary(float(joined[worst]), float(np.median(joined)), names[worst])


def _median_length(texts: Sequence[RowPairs]) -> float:
    """The median expected length of ordinary rows."""
    lengths = _selected([_lengths(r.expected) for r in texts], [_ordinary(r) for r in texts])
    return float(np.median(lengths))


def _ordinary(rows: RowPairs) -> npt.NDArray[np.bool_]:
    """Mask of rows that are neither the first position nor tokens of low norm."""
    here = np.arange(len(rows.expected))
    return (here > 0) & (here < (len(here) if rows.low is None else rows.low))


def _selected(values: Sequence[Floats], chosen: Sequence[npt.NDArray[np.bool_]]) -> Floats:
    return np.concatenate([each[here] for each, here in zip(values, chosen, strict=True)])


def _lengths(rows: Floats) -> Floats:
    with np.errstate(all="ignore"):
        found: Floats = np.linalg.norm(rows.astype(np.float64), axis=1)
    return found


def _row_errors(rows: RowPairs) -> Floats:
    """Length of each row's error; `_HUGE` if it is not finite."""
    with np.errstate(all="ignore"):
        error = _lengths(rows.found.astype(np.float64) - rows.expected)
    return np.where(np.isfinite(error), error, _HUGE)


def _ratios(rows: RowPairs) -> Floats:
    """Found / expected length of each row, clipped for a logarithm."""
    return np.clip(_ratio(_lengths(rows.found), _lengths(rows.expected)), 1 / _HUGE, _HUGE)


def _relative_errors(rows: RowPairs) -> Floats:
    """Length of each row's error / its expected length."""
    return _ratio(_row_errors(rows), _lengths(rows.expected))


def _ratio(a: Floats, b: Floats) -> Floats:
    """A / b: 1 for 0 / 0, `_HUGE` if it is not finite."""
    with np.errstate(all="ignore"):
        found = np.where((a == 0) & (b == 0), 1.0, a / b)
    return np.where(np.isfinite(found), found, _HUGE)


def _log_distance(ratios: Floats) -> Floats:
    far: Floats = np.abs(np.log(ratios))
    return far


_HUGE = 1e9
"""In place of infinite and NaN measures."""


def _kl_divergences(found: Floats, expected: Floats) -> Floats:
    """KL divergence of each row of logits, in nats."""
    ours, theirs = _log_softmax(found), _log_softmax(expected)
    each: Floats = (np.exp(theirs) * (theirs - ours)).sum(1)
    return each


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return found
