"""Elementwise operations.

Correctly rounded IEEE operations (sums, products, quotients, square roots) are bit-identical in
every memory layout. numpy's others (exp, pow) may use one kernel for contiguous memory, another for
other layouts, and a third for the remainder after the last whole vector, depending on the machine.
`by_lanes` thus passes only contiguous whole vectors.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from paceline_coreml.rehearsal.ops.table import Array, op

_LANES: Final = 64
"""A multiple of every vector width of numpy's kernels."""


def by_lanes(function: Callable[..., Array], *arrays: Array) -> Array:
    """Apply a numpy function to arrays of one shape, independent of positions in the arrays."""
    shape = arrays[0].shape
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    over = -flat[0].size % _LANES
    if over:
        flat = [np.concatenate([vector, np.ones(over, vector.dtype)]) for vector in flat]
    numbers = function(*flat)
    return numbers[: numbers.size - over].reshape(shape)


def exp(x: Array) -> Array:
    return by_lanes(np.exp, x)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + exp(-x))


def larger(x: Array, y: Array | float) -> Array:
    """Return the larger of two numbers; +0 for two zeros."""
    return np.maximum(x, y) + 0


def smaller(x: Array, y: Array | float) -> Array:
    """Return the smaller of two numbers; +0 for two zeros."""
    return np.minimum(x, y) + 0


op("abs")(lambda x: np.abs(x))  # noqa: PLW0108  (a ufunc has no signature)
op("sign")(lambda x: np.sign(x))  # noqa: PLW0108
op("exp")(exp)
op("sigmoid")(sigmoid)
op("add")(lambda x, y: x + y)
op("sub")(lambda x, y: x - y)
op("mul")(lambda x, y: x * y)
op("real_div")(lambda x, y: x / y)
op("maximum")(larger)


@op("pow")
def _pow(x: Array, y: Array) -> Array:
    if y.ndim == 0 and y == 2:  # traced norms have this; correctly rounded, and much faster
        return np.square(x)
    x, y = np.broadcast_arrays(x, y)
    return by_lanes(np.power, x, y)


@op("rsqrt")
def _rsqrt(x: Array, epsilon: float = 1e-12) -> Array:
    return 1 / np.sqrt(x + epsilon)


@op("silu")
def _silu(x: Array) -> Array:
    return x * sigmoid(x)


@op("gelu", mode=("EXACT",))
def _gelu(x: Array, mode: str = "EXACT") -> Array:
    """Compute with the standard library's erf, number by number: numpy has none, and it is rare."""
    errors: Any = (math.erf(value) for value in np.ravel(x * math.sqrt(0.5)).tolist())
    output: Array = 0.5 * x * (1 + np.fromiter(errors, np.float32, x.size).reshape(x.shape))
    return output


@op("clip")
def _clip(x: Array, alpha: float, beta: float) -> Array:
    return smaller(larger(x, alpha), beta)


@op("cast")
def _cast(x: Array, dtype: str) -> Array:
    """Return x: the caller converts it to the output's declared type, which equals `dtype`."""
    return x


@op("identity", moves=True)
def _identity(x: Array) -> Array:
    return x
