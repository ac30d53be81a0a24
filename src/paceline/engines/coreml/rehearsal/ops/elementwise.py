"""Elementwise operations.

Operations that IEEE rounds correctly (sums, products, quotients, square roots) have the same bits
in every memory layout. numpy's others (exp, log, tanh, pow) may use one kernel for contiguous
memory, another for the rest, and a third for the remainder after the last whole vector, depending
on the machine: `by_lanes` passes contiguous whole vectors only.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from paceline.engines.coreml.rehearsal.ops.table import Array, op

_LANES: Final = 64
"""A multiple of every vector width of numpy's kernels."""


def by_lanes(function: Callable[..., Array], *arrays: Array) -> Array:
    """Apply a numpy function to arrays of one shape, independent of positions in them."""
    shape = arrays[0].shape
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    over = -flat[0].size % _LANES
    if over:
        flat = [np.concatenate([one, np.ones(over, one.dtype)]) for one in flat]
    found = function(*flat)
    return found[: found.size - over].reshape(shape)


def exp(x: Array) -> Array:
    """e^x."""
    return by_lanes(np.exp, x)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x)."""
    return 1 / (1 + exp(-x))


def larger(x: Array, y: Array | float) -> Array:
    """The larger of two numbers; +0 for two zeros."""
    return np.maximum(x, y) + 0


def smaller(x: Array, y: Array | float) -> Array:
    """The smaller of two numbers; +0 for two zeros."""
    return np.minimum(x, y) + 0


@op("add")
def _add(x: Array, y: Array) -> Array:
    return np.add(x, y)


@op("sub")
def _sub(x: Array, y: Array) -> Array:
    return np.subtract(x, y)


@op("mul")
def _mul(x: Array, y: Array) -> Array:
    return np.multiply(x, y)


@op("real_div")
def _real_div(x: Array, y: Array) -> Array:
    return np.divide(x, y)


@op("floor_div")
def _floor_div(x: Array, y: Array) -> Array:
    return np.floor_divide(x, y)


@op("mod")
def _mod(x: Array, y: Array) -> Array:
    return np.mod(x, y)


@op("pow")
def _pow(x: Array, y: Array) -> Array:
    if y.ndim == 0 and y == 2:  # as norms are traced; correctly rounded, and much faster
        return np.square(x)
    x, y = np.broadcast_arrays(x, y)
    return by_lanes(np.power, x, y)


@op("maximum")
def _maximum(x: Array, y: Array) -> Array:
    return larger(x, y)


@op("minimum")
def _minimum(x: Array, y: Array) -> Array:
    return smaller(x, y)


@op("abs")
def _abs(x: Array) -> Array:
    return np.abs(x)


@op("square")
def _square(x: Array) -> Array:
    return np.square(x)


@op("sign")
def _sign(x: Array) -> Array:
    return np.sign(x)


@op("floor")
def _floor(x: Array) -> Array:
    return np.floor(x)


@op("sqrt")
def _sqrt(x: Array) -> Array:
    return np.sqrt(x)


@op("rsqrt")
def _rsqrt(x: Array, epsilon: float = 1e-12) -> Array:
    return 1 / np.sqrt(x + epsilon)


@op("inverse")
def _inverse(x: Array, epsilon: float = 1e-4) -> Array:
    return 1 / (x + epsilon)


@op("exp")
def _exp(x: Array) -> Array:
    return exp(x)


@op("log")
def _log(x: Array, epsilon: float = 1e-45) -> Array:
    return by_lanes(np.log, x + epsilon)


@op("tanh")
def _tanh(x: Array) -> Array:
    return by_lanes(np.tanh, x)


@op("sin")
def _sin(x: Array) -> Array:
    return by_lanes(np.sin, x)


@op("cos")
def _cos(x: Array) -> Array:
    return by_lanes(np.cos, x)


@op("erf")
def _erf(x: Array) -> Array:
    return _error_function(x)


@op("sigmoid")
def _sigmoid(x: Array) -> Array:
    return sigmoid(x)


@op("silu")
def _silu(x: Array) -> Array:
    return x * sigmoid(x)


@op("relu")
def _relu(x: Array) -> Array:
    return larger(x, 0)


@op("softplus")
def _softplus(x: Array) -> Array:
    return larger(x, 0) + by_lanes(np.log1p, exp(-np.abs(x)))


@op("gelu", mode=("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"))
def _gelu(x: Array, mode: str = "EXACT") -> Array:
    if mode == "SIGMOID_APPROXIMATION":
        return x * sigmoid(1.702 * x)
    if mode == "TANH_APPROXIMATION":
        gate = by_lanes(np.tanh, math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))
    else:
        gate = _error_function(x * math.sqrt(0.5))
    found: Array = 0.5 * x * (1 + gate)
    return found


@op("clip")
def _clip(x: Array, alpha: float, beta: float) -> Array:
    return smaller(larger(x, alpha), beta)


@op("equal")
def _equal(x: Array, y: Array) -> Array:
    return np.equal(x, y)


@op("not_equal")
def _not_equal(x: Array, y: Array) -> Array:
    return np.not_equal(x, y)


@op("greater")
def _greater(x: Array, y: Array) -> Array:
    return np.greater(x, y)


@op("greater_equal")
def _greater_equal(x: Array, y: Array) -> Array:
    return np.greater_equal(x, y)


@op("less")
def _less(x: Array, y: Array) -> Array:
    return np.less(x, y)


@op("less_equal")
def _less_equal(x: Array, y: Array) -> Array:
    return np.less_equal(x, y)


@op("logical_and")
def _logical_and(x: Array, y: Array) -> Array:
    return np.logical_and(x, y)


@op("logical_or")
def _logical_or(x: Array, y: Array) -> Array:
    return np.logical_or(x, y)


@op("logical_xor")
def _logical_xor(x: Array, y: Array) -> Array:
    return np.logical_xor(x, y)


@op("logical_not")
def _logical_not(x: Array) -> Array:
    return np.logical_not(x)


@op("select", moves=True)
def _select(cond: Array, a: Array, b: Array) -> Array:
    return np.where(cond, a, b)


@op("cast")
def _cast(x: Array, dtype: str) -> Array:
    """`dtype` is also the declared type of the output, to which the caller converts."""
    return x


@op("identity", moves=True)
def _identity(x: Array) -> Array:
    return x


def _error_function(x: Array) -> Array:
    """The standard library's erf, number by number: it is rare, and numpy has none."""
    each: Any = (math.erf(value) for value in np.ravel(x).tolist())
    return np.fromiter(each, np.float32, x.size).reshape(x.shape)
