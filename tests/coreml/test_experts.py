"""Experts without data-dependent shapes against the plain formula."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from paceline_coreml.conversion.experts import Experts, Stack, swiglu, top_k_mask

pytestmark = pytest.mark.coreml

# Few different numbers, so that there are ties; and neighbours in float16.
SCORES = st.sampled_from([0.0, -0.0, 0.25, 0.5, 0.50048828125, 1.0, -3.0, 6.0e-8, 1.2e-7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@given(data=st.data())
def test_the_mask_has_the_top_k_and_the_first_of_equal_scores(
    dtype: torch.dtype, data: st.DataObject
):
    experts = data.draw(st.integers(1, 12))
    rows = data.draw(st.integers(1, 4))
    k = data.draw(st.integers(1, experts))
    scores = data.draw(st_numpy.arrays(np.float32, (experts, rows), elements=SCORES))
    found = top_k_mask(torch.from_numpy(scores).to(dtype)[None, :, :, None], k)
    assert found.dtype == dtype
    expected = np.zeros_like(scores)
    best = np.argsort(-scores.astype(np.float16), axis=0, kind="stable")[:k]
    np.put_along_axis(expected, best, 1, axis=0)
    np.testing.assert_array_equal(found[0, :, :, 0].numpy(), expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("max_channels", [1, 12, 18, 16384])
@pytest.mark.parametrize("rows", [1, 4])
def test_experts_are_summed_with_their_weights(rows: int, max_channels: int, biased: bool):
    experts, d, ff = 7, 5, 6
    rng = np.random.default_rng(0)

    def stack(out: int, inward: int) -> Stack:
        weight, bias = rng.normal(size=(experts, out, inward)), rng.normal(size=(experts, out))
        both = torch.from_numpy(weight).float(), torch.from_numpy(bias).float()
        return Stack(*both) if biased else Stack(both[0])

    gate, up, down = stack(ff, d), stack(ff, d), stack(d, ff)
    x = torch.from_numpy(rng.normal(size=(rows, d))).float()
    weights = torch.from_numpy(rng.random((rows, experts))).float()
    module = Experts(gate, up, down, max_channels=max_channels)
    found = module(x.T[None, :, :, None], weights.T[None, :, :, None])[0, :, :, 0].T

    def times(matrix: Stack, at: int, y: torch.Tensor) -> torch.Tensor:
        out = y @ matrix.weight[at].T
        return out if matrix.bias is None else out + matrix.bias[at]

    expected = sum(
        weights[:, at : at + 1] * times(down, at, swiglu(times(gate, at, x), times(up, at, x)))
        for at in range(experts)
    )
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-4, rtol=1e-5)


def test_no_axis_exceeds_the_neural_engines_limit():
    size = 1792  # of LFM2.5-8B-A1B; 32 of them are 57,344 channels
    stack = Stack(torch.zeros(32, size, 2))
    experts = Experts(stack, stack, Stack(torch.zeros(32, 2, size)))
    assert [gate.out_channels for gate in experts.gates] == [8 * size] * 4
