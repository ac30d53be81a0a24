"""Compares an artifact's arrays with the expected ones, row by row, and defines the criteria.

It uses only arrays: neither artifacts nor torch. Special rows (tokens) have their own criteria, so
that they neither hide nor cause faults:

- *Ordinary rows*: cosine and length. A cosine does not show a constant factor, which the next norm
  may or may not remove.
- *The first position*: its own cosine. It is the attention sink. In SmolLM2-135M it is up to 168x
  as long as other rows, due to a few channels, and would dominate a cosine over all rows: between
  the hidden states of layers 12 and 13, that cosine is 0.99997, but the median over rows is 0.976.
- *Small rows*: error relative to an ordinary row, because the direction of a row near zero is
  noise. These are low-norm tokens, and rows shorter than `SMALL` of the median length.
- *Models with experts*: the median row. Rounding flips near ties in a router; the row then uses
  another expert, and differs without a fault.
- *Top tokens*: a different one counts if the expected logits rate it below their own by more than a
  margin. Rounding flips near ties.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

SMALL = 1 / 8
"""Rows shorter than this fraction of the median length are small."""

TOP = 5
"""An expected top token counts as contained if it is one of this number of best tokens."""

_HUGE = 1e9
"""A replacement for infinite and NaN values."""


class RowFacts(NamedTuple):
    """The properties of the n rows of all texts, concatenated."""

    names: Sequence[str]
    """Names such as `row 4 of prose`."""
    first: Bools
    """[n]: True at the first position of a text."""
    low: Bools
    """[n]: True for a low-norm token."""


@dataclass(frozen=True, slots=True)
class Summary:
    worst: float
    median: float
    at: str
    """The worst row; empty without rows."""

    def criterion(self, *, experts: bool) -> float:
        return self.median if experts else self.worst


@dataclass(frozen=True, slots=True)
class Nearness:
    cosine: Summary
    """Cosines of ordinary rows; -1 if an element is not finite."""
    length: Summary
    """Actual / expected length of ordinary rows; the worst is the farthest from 1."""
    small: Summary
    """Errors of small rows / the median length."""
    first: float
    """Minimum cosine at first positions."""
    first_length: float
    """Expected length at a first position / the median length: large for an attention sink."""
    largest: float
    """The largest actual magnitude; float16's maximum is 65504."""

    def faults(self, threshold: float, *, experts: bool) -> list[str]:
        allowed = allowed_error(threshold)
        cosine, length, small = (
            summary.criterion(experts=experts) for summary in (self.cosine, self.length, self.small)
        )
        where = "at the median row" if experts else f"at {self.cosine.at}"
        expected = f"expected {threshold} or more"
        messages = []
        if cosine < threshold:
            messages.append(f"cosine {cosine:.5f} {where}, {expected}")
        if not 1 / (1 + allowed) <= length <= 1 + allowed:
            messages.append(f"rows are {length:.3g} times as long as expected")
        if self.first < threshold:
            messages.append(f"cosine {self.first:.5f} at the first position, {expected}")
        if not small <= allowed:
            messages.append(
                f"low-norm rows are off by {small:.3f} of an ordinary row's length, expected "
                f"at most {allowed:.3f}"
            )
        return messages


def allowed_error(threshold: float) -> float:
    return sqrt(max(2 * (1 - threshold), 0.0))


def nearness(rows: RowFacts, actual: Floats, expected: Floats) -> Nearness:
    """Compare rows, [n, channels] each; each text has at least two."""
    lengths, usual = _lengths(expected), ~(rows.first | rows.low)
    typical = float(np.median(lengths[usual]))
    ordinary = usual & (lengths >= SMALL * typical)
    row_cosines = cosines(actual, expected)
    ratios = np.clip(_ratio(_lengths(actual), lengths), 1 / _HUGE, _HUGE)
    errors = _errors(actual, expected) / (typical or 1)
    return Nearness(
        cosine=_summary(rows, ordinary, row_cosines, -row_cosines, empty=1.0),
        length=_summary(rows, ordinary, ratios, np.abs(np.log(ratios)), empty=1.0),
        small=_summary(rows, ~ordinary & ~rows.first, errors, errors, empty=0.0),
        first=float(row_cosines[rows.first].min()),
        first_length=float(lengths[rows.first].max()) / (typical or 1),
        largest=float(np.abs(actual).max()),
    )


def nearest(about: RowFacts, actual: Floats, candidates: Iterable[Floats]) -> int:
    """Return the index of the candidate with the smallest median relative error of usual rows."""
    usual = ~(about.first | about.low)
    errors = [_ratio(_errors(actual, rows), _lengths(rows))[usual] for rows in candidates]
    return int(np.argmin([np.median(error) for error in errors]))


def cosines(actual: Floats, expected: Floats) -> npt.NDArray[np.float64]:
    """Return row cosines [n] of two [n, channels]: 1 if both are 0, -1 if one is not finite."""
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    norms = _lengths(a) * _lengths(b)
    with np.errstate(all="ignore"):
        row_cosines = np.where(norms > 0, (a * b).sum(1) / norms, 0.0)
    row_cosines[~(a.any(1) | b.any(1))] = 1.0
    finite = np.isfinite(a).all(1) & np.isfinite(b).all(1)
    return np.where(finite, np.clip(row_cosines, -1, 1), -1.0)


def difference(actual: Floats, expected: Floats) -> float:
    """Return the largest absolute difference, or inf if only one element of a pair is NaN."""
    differ = ~((actual == expected) | (np.isnan(actual) & np.isnan(expected)))
    if not differ.any():
        return 0.0
    off = float(np.abs(actual[differ].astype(np.float64) - expected[differ]).max())
    return off if np.isfinite(off) else np.inf


def centred(logits: Floats) -> npt.NDArray[np.float64]:
    """Subtract each row's mean from logits [n, vocab], which does not change the top token."""
    wide = logits.astype(np.float64)
    centred_logits: npt.NDArray[np.float64] = wide - wide.mean(1, keepdims=True)
    return centred_logits


@dataclass(frozen=True, slots=True)
class Parity:
    rows: int
    equal: int
    decided: int
    """Clear rows: their two best expected logits differ by more than the margin."""
    decided_equal: int
    contained: int
    """Rows whose expected top token is among the `TOP` best actual ones."""
    worst: float
    """Maximum nats between the expected and the actual top token, in the expected logits."""
    at: str
    """The row of `worst`."""
    divergence: float
    """Mean KL divergence between the expected and the actual distribution, in nats."""


def parity(rows: RowFacts, where: Bools, actual: Floats, expected: Floats, margin: float) -> Parity:
    """Compare top tokens of logits, [n, vocab] each, in the rows `where`, [n]."""
    actual, expected = actual[where], expected[where].astype(np.float64)
    top, right = actual.argmax(1), expected.argmax(1)
    second, best = np.partition(expected, -2, axis=1)[:, -2:].T
    lower = best - expected[np.arange(len(top)), top]
    same, clear = top == right, best - second > margin
    contained = np.argpartition(actual, -min(TOP, actual.shape[1]), axis=1)[:, -TOP:]
    worst = int(lower.argmax())
    return Parity(
        rows=len(top),
        equal=int(same.sum()),
        decided=int(clear.sum()),
        decided_equal=int((same & clear).sum()),
        contained=int((contained == right[:, None]).any(1).sum()),
        worst=float(lower[worst]),
        at=rows.names[np.flatnonzero(where)[worst]],
        divergence=float(_kl_divergences(expected, actual).mean()),
    )


def _kl_divergences(expected: Floats, actual: Floats) -> Floats:
    """Compute KL(expected || actual) for each row of logits, [n, vocab] -> [n], in nats."""
    expected_logs, actual_logs = _log_softmax(expected), _log_softmax(actual)
    divergences: Floats = (np.exp(expected_logs) * (expected_logs - actual_logs)).sum(axis=1)
    return divergences


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    logs: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs


def _summary(
    rows: RowFacts, chosen: Bools, values: Floats, badness: Floats, *, empty: float
) -> Summary:
    """Summarize the chosen rows' values; `empty` if no row is chosen."""
    if not chosen.any():
        return Summary(empty, empty, "")
    worst = int(np.where(chosen, badness, -np.inf).argmax())
    return Summary(float(values[worst]), float(np.median(values[chosen])), rows.names[worst])


def _lengths(rows: Floats) -> Floats:
    with np.errstate(all="ignore"):
        lengths: Floats = np.linalg.norm(rows.astype(np.float64), axis=1)
    return lengths


def _errors(actual: Floats, expected: Floats) -> Floats:
    """Return the lengths of the rows' errors; `_HUGE` where they are not finite."""
    with np.errstate(all="ignore"):
        errors = _lengths(actual.astype(np.float64) - expected)
    return np.where(np.isfinite(errors), errors, _HUGE)


def _ratio(a: Floats, b: Floats) -> Floats:
    """Return a / b: 1 for 0 / 0, and `_HUGE` where it is not finite."""
    with np.errstate(all="ignore"):
        ratios = np.where((a == 0) & (b == 0), 1.0, a / b)
    return np.where(np.isfinite(ratios), ratios, _HUGE)
