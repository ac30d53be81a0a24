"""Sums of products: the one function by which every matrix of a program is multiplied.

Why a row does not depend on its neighbours: each number of a product is a dot product of two
contiguous vectors, and is computed from nothing but these two, by a call of its own (`vecdot` makes
one BLAS `sdot` for each). How many such vectors there are, and where in the block they stand, does
not enter. A matrix-vector or matrix-matrix routine would be asked for the whole block, and may
choose its kernel, and so its order of summation, by how many rows the block has.

Where the vectors are short, the terms are added one after the other instead, which is as
independent, and fast where there are many such vectors (a write of T rows into S slots is a product
over T). A row that selects (one 1, else 0) is exact on either path, whatever T is: every other
term is a zero, and adding zeros rounds nothing.
"""

from typing import Final

import numpy as np

from paceline.engines.coreml.rehearsal.ops.table import Array

SHORT: Final = 16
"""Terms up to which sums are made term by term."""


def dots(a: Array, b: Array) -> Array:
    """The dot product of every vector of `a` with every vector of `b`.

    a: [..., M, K], b: [..., N, K], leading axes broadcast; returns [..., M, N].
    """
    terms = a.shape[-1]
    if terms != b.shape[-1]:
        raise ValueError(f"vectors of {terms} and {b.shape[-1]} numbers cannot be multiplied")
    if terms > SHORT:
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        # The matrix with more vectors is gone through once, past all of the other.
        if a.shape[-2] >= b.shape[-2]:
            found: Array = np.vecdot(a[..., :, None, :], b[..., None, :, :])
        else:
            found = np.vecdot(a[..., None, :, :], b[..., :, None, :]).swapaxes(-1, -2)
        return found
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = np.zeros((*shape, a.shape[-2], b.shape[-2]), np.result_type(a, b))
    for term in range(terms):
        total += a[..., :, None, term] * b[..., None, :, term]
    return total
