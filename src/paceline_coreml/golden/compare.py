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

from paceline.decoding.logprobs import kl_divergences

Floats = npt.NDArray[Any]

SMALL = 1 / 8
"""Rows shorter than this fraction of the median length are small."""

TOP = 5
"""An expected top token among this number of best ones counts as contained."""


class RowPairs(NamedTuple):
    """One text's rows: the artifact's and the reference's."""

    text: str
    actual: Floats
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
    """Actual / expected, of ordinary rows; the worst is the farthest from 1."""
    small: Summary
    """Errors of small rows / the median length."""
    first: float
    """Minimum cosine at a first position."""
    first_length: float
    """Expected length of a first position / the median length: large for an attention sink."""
    largest: float
    """The largest actual magnitude; float16's maximum is 65504."""

    def faults(self, threshold: float, *, experts: bool) -> list[str]:
        """Faults as messages."""
        allowed = allowed_error(threshold)
        cosine, length, small = (
            summary.criterion(experts=experts) for summary in (self.cosine, self.length, self.small)
        )
        where = "at the median row" if experts else f"at {self.cosine.at}"
        messages = []
        if cosine < threshold:
            messages.append(f"cosine {cosine:.5f} {where}, expected {threshold} or more")
        if not 1 / (1 + allowed) <= length <= 1 + allowed:
            messages.append(f"rows are {length:.3g} times as long as they should be")
        if self.first < threshold:
            messages.append(
                f"cosine {self.first:.5f} at the first position, expected {threshold} or more"
            )
        if not small <= allowed:
            messages.append(
                f"rows of low norm are off by {small:.3f} of an ordinary row's length, expected "
                f"{allowed:.3f} at most"
            )
        return messages


def allowed_error(threshold: float) -> float:
    """The relative error of a vector whose cosine is `threshold`."""
    return sqrt(max(2 * (1 - threshold), 0.0))


def nearness(texts: Sequence[RowPairs]) -> Nearness:
    """Compare the rows of all texts, which have at least two rows."""
    typical = _median_length(texts)
    ordinary = [_ordinary(rows) & (_lengths(rows.expected) >= SMALL * typical) for rows in texts]
    small = [~mask & (np.arange(len(mask)) > 0) for mask in ordinary]
    row_cosines = [cosines(rows.actual, rows.expected) for rows in texts]
    return Nearness(
        cosine=_summary(texts, ordinary, row_cosines, np.negative, empty=1.0),
        length=_summary(texts, ordinary, [_ratios(r) for r in texts], _log_distance, empty=1.0),
        small=_summary(
            texts, small, [_row_errors(r) / (typical or 1) for r in texts], np.abs, empty=0.0
        ),
        first=float(min(values[0] for values in row_cosines)),
        first_length=max(float(_lengths(r.expected[:1])[0]) for r in texts) / (typical or 1),
        largest=float(max(np.abs(rows.actual).max() for rows in texts)),
    )


def cosines(actual: Floats, expected: Floats) -> npt.NDArray[np.float64]:
    """[T, n] twice -> cosines of rows [T]: 1 if both are 0, -1 if one is not finite."""
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        row_cosines = np.where(norms > 0, (a * b).sum(1) / norms, 0.0)
    row_cosines[~(a.any(1) | b.any(1))] = 1.0
    finite = np.isfinite(a).all(1) & np.isfinite(b).all(1)
    return np.where(finite, np.clip(row_cosines, -1, 1), -1.0)


def nearest(candidates: Sequence[Sequence[RowPairs]]) -> int:
    """Index of the candidate with the smallest median error of ordinary rows.

    Candidates have the same actual rows, and different expected rows.
    """
    errors = [
        _selected([_relative_errors(r) for r in texts], [_ordinary(r) for r in texts])
        for texts in candidates
    ]
    return int(np.argmin([np.median(error) for error in errors]))


def centred(logits: Floats) -> npt.NDArray[np.float64]:
    """[T, vocab] minus the row's mean, which does not change the top token."""
    wide = logits.astype(np.float64)
    centred_logits: npt.NDArray[np.float64] = wide - wide.mean(1, keepdims=True)
    return centred_logits


@dataclass(frozen=True, slots=True)
class Parity:
    """Agreement of top tokens."""

    rows: int
    equal: int
    decided: int
    """Rows whose two best expected logits differ by more than the margin."""
    decided_equal: int
    contained: int
    """Rows whose expected top token is among the `TOP` best actual ones."""
    worst: float
    """Maximum by which the expected logits rate the actual top token below their own, in nats."""
    at: str
    """The row of `worst`."""
    divergence: float
    """Mean KL divergence of the actual from the expected distribution, in nats."""


def parity(texts: Sequence[RowPairs], margin: float) -> Parity:
    """Compare top tokens; `actual` and `expected` are logits."""
    equal = decided = decided_equal = contained = rows = 0
    worst, at, divergence = 0.0, "", 0.0
    for text in texts:
        actual, expected = text.actual.astype(np.float64), text.expected.astype(np.float64)
        row = np.arange(len(actual))
        top_actual, top_expected = actual.argmax(1), expected.argmax(1)
        second, best = np.partition(expected, -2, axis=1)[:, -2:].T
        lower = best - expected[row, top_actual]
        same, clear = top_actual == top_expected, best - second > margin
        top = np.argpartition(actual, -min(TOP, actual.shape[1]), axis=1)[:, -TOP:]
        rows += len(actual)
        equal += int(same.sum())
        decided += int(clear.sum())
        decided_equal += int((same & clear).sum())
        contained += int((top == top_expected[:, None]).any(1).sum())
        if lower.max() > worst:
            worst, at = float(lower.max()), f"row {lower.argmax()} of {text.text}"
        divergence += float(kl_divergences(text.expected, text.actual).sum())
    return Parity(
        rows, equal, decided, decided_equal, contained, worst, at, divergence / max(rows, 1)
    )


def difference(actual: Mapping[str, Floats], expected: Mapping[str, Floats]) -> float:
    """The largest absolute difference over all texts; inf if only one element is NaN."""
    worst = 0.0
    for name, theirs in expected.items():
        ours = actual[name]
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
        for rows, mask in zip(texts, chosen, strict=True)
        for row in np.flatnonzero(mask)
    ]
    return Summary(float(joined[worst]), float(np.median(joined)), names[worst])


def _median_length(texts: Sequence[RowPairs]) -> float:
    """The median expected length of ordinary rows."""
    lengths = _selected([_lengths(r.expected) for r in texts], [_ordinary(r) for r in texts])
    return float(np.median(lengths))


def _ordinary(rows: RowPairs) -> npt.NDArray[np.bool_]:
    """Mask of rows that are neither the first position nor tokens of low norm."""
    row = np.arange(len(rows.expected))
    return (row > 0) & (row < (len(row) if rows.low is None else rows.low))


def _selected(values: Sequence[Floats], chosen: Sequence[npt.NDArray[np.bool_]]) -> Floats:
    return np.concatenate([numbers[mask] for numbers, mask in zip(values, chosen, strict=True)])


def _lengths(rows: Floats) -> Floats:
    with np.errstate(all="ignore"):
        lengths: Floats = np.linalg.norm(rows.astype(np.float64), axis=1)
    return lengths


def _row_errors(rows: RowPairs) -> Floats:
    """Lengths of the rows' errors; `_HUGE` if it is not finite."""
    with np.errstate(all="ignore"):
        error = _lengths(rows.actual.astype(np.float64) - rows.expected)
    return np.where(np.isfinite(error), error, _HUGE)


def _ratios(rows: RowPairs) -> Floats:
    """Actual / expected lengths of rows, clipped for a logarithm."""
    return np.clip(_ratio(_lengths(rows.actual), _lengths(rows.expected)), 1 / _HUGE, _HUGE)


def _relative_errors(rows: RowPairs) -> Floats:
    """Lengths of the rows' errors / the rows' expected lengths."""
    return _ratio(_row_errors(rows), _lengths(rows.expected))


def _ratio(a: Floats, b: Floats) -> Floats:
    """A / b: 1 for 0 / 0, `_HUGE` if it is not finite."""
    with np.errstate(all="ignore"):
        ratios = np.where((a == 0) & (b == 0), 1.0, a / b)
    return np.where(np.isfinite(ratios), ratios, _HUGE)


def _log_distance(ratios: Floats) -> Floats:
    far: Floats = np.abs(np.log(ratios))
    return far


_HUGE = 1e9
"""In place of infinite and NaN measures."""
