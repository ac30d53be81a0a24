"""Compares an artifact's arrays with the expected ones, row by row, and defines the criteria.

It uses only arrays: neither artifacts nor torch. Every row has its own cosine and error relative to
its length. The first position is an attention sink: in SmolLM2-135M it is up to 168x as long as
other rows, due to a few channels, and would dominate a cosine over all rows. Between the hidden
states of layers 12 and 13, that cosine is 0.99997, but the median over rows is 0.976. A cosine does
not show a constant factor, which the next norm may or may not remove, but the error does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
TOP = 5
"""An expected top token counts as contained if it is one of this number of best tokens."""

_HUGE = 1e9
"""A replacement for infinite and NaN values."""


@dataclass(frozen=True, slots=True)
class Summary:
    worst: float
    median: float
    at: str
    """Name of the worst row."""


@dataclass(frozen=True, slots=True)
class Nearness:
    cosine: Summary
    """Cosines; -1 if an element is not finite."""
    error: Summary
    """Lengths of the differences / lengths of the expected rows."""
    largest: float
    """The largest actual magnitude; float16's maximum is 65504."""

    def faults(self, threshold: float) -> list[str]:
        """Return a fault if a cosine is below the threshold, or an error above its equivalent."""
        if self.cosine.worst < threshold:
            cosine = self.cosine
            return [f"cosine {cosine.worst:.5f} at {cosine.at}, expected {threshold} or more"]
        allowed = sqrt(2 * (1 - threshold))
        if self.error.worst <= allowed:
            return []
        return [
            f"off by {self.error.worst:.3g} of its length at {self.error.at}, expected at most "
            f"{allowed:.3g}"
        ]


def nearness(names: Sequence[str], actual: Floats, expected: Floats) -> Nearness:
    """Compare rows, [n, channels] each, with their names."""
    row_cosines, errors = cosines(actual, expected), _relative_errors(actual, expected)
    lowest, largest = int(row_cosines.argmin()), int(errors.argmax())
    return Nearness(
        Summary(float(row_cosines[lowest]), float(np.median(row_cosines)), names[lowest]),
        Summary(float(errors[largest]), float(np.median(errors)), names[largest]),
        float(np.abs(actual).max()),
    )


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


def parity(names: Sequence[str], actual: Floats, expected: Floats, margin: float) -> Parity:
    """Compare top tokens of logits, [n, vocab] each."""
    expected = expected.astype(np.float64)
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
        at=names[worst],
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


def _lengths(rows: Floats) -> Floats:
    with np.errstate(all="ignore"):
        lengths: Floats = np.linalg.norm(rows.astype(np.float64), axis=1)
    return lengths


def _relative_errors(actual: Floats, expected: Floats) -> Floats:
    """Return |actual - expected| / |expected| of rows: 0 for 0 / 0, `_HUGE` if it is not finite."""
    with np.errstate(all="ignore"):
        errors = _lengths(actual.astype(np.float64) - expected)
        ratios = np.where(errors == 0, 0.0, errors / _lengths(expected))
    return np.where(np.isfinite(ratios), ratios, _HUGE)
