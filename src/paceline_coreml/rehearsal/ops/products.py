"""Sums of products: the one function that multiplies every matrix of a program.

Why rows are independent: a number of a product is the dot product of two contiguous vectors,
computed by a separate call (`vecdot` makes one BLAS `sdot` per pair). The number and position of
the vectors do not matter. A matrix-vector or matrix-matrix routine gets the whole block, and may
choose its kernel, and so its order of summation, by the number of rows.

Short vectors are summed term by term, which is as independent, and fast for many such vectors (a
write of T rows into S slots is a product over T). A one-hot row is exact on either path for every
T: adding zeros does not round.
"""

from typing import Final

import numpy as np

from paceline_coreml.rehearsal.ops.table import Array

SHORT: Final = 16
"""Most terms of a vector that is summed term by term."""


def dots(a: Array, b: Array) -> Array:
    """The dot product of every vector of `a` with every vector of `b`.

    a: [..., M, K], b: [..., N, K], leading axes broadcast; returns [..., M, N].
    """
    terms = a.shape[-1]
    if terms != b.shape[-1]:
        raise ValueError(f"vectors of {terms} and {b.shape[-1]} numbers cannot be multiplied")
    if terms > SHORT:
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        # One pass over the matrix with more vectors.
        if a.shape[-2] >= b.shape[-2]:
            products: Array = np.vecdot(a[..., :, None, :], b[..., None, :, :])
        else:
            products = np.vecdot(a[..., None, :, :], b[..., :, None, :]).swapaxes(-1, -2)
        return products
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = np.zeros((*shape, a.shape[-2], b.shape[-2]), np.result_type(a, b))
    for term in range(terms):
        total += a[..., :, None, term] * b[..., None, :, term]
    return total
