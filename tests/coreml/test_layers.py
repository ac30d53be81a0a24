"""Building blocks of all families, each against the plain formula."""

import numpy as np
import pytest
import torch

from paceline_coreml.conversion.layers import RMSNorm

pytestmark = pytest.mark.coreml

SLOTS, ROWS = 32, 4


def normed(x: np.ndarray, weight: np.ndarray, eps: float, axis: int) -> np.ndarray:
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    return x / np.sqrt((x**2).mean(axis, keepdims=True) + eps) * weight.reshape(shape)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("largest", [25_000.0, 60_000.0, 1.0, 1e-3, 1e-4])
def test_a_norm_in_float16_is_that_of_float64(largest: float, eps: float):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 96, 5, 1))
    x = (x / np.abs(x).max() * largest).astype(np.float16)
    x[0, :, 0] = 0
    # Like a first token: nearly all of it is in one channel.
    x[0, 1:, 1] *= np.float16(1e-3)
    weight = rng.normal(1, 0.2, 96).astype(np.float16)
    norm = RMSNorm(torch.from_numpy(weight).float(), eps).half()
    found = norm(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, normed(x, weight, eps, 1), rtol=4e-3, atol=1e-3)
