"""Building blocks of layers against the plain formula: norms, experts and routers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from paceline_coreml.conversion.experts import Experts, Stack, swiglu, top_k_mask
from paceline_coreml.conversion.families.zaya import unit
from paceline_coreml.conversion.layers import RMSNorm
from support.coreml_families import EXPERTS, VOCAB, TinyModel

pytestmark = pytest.mark.coreml

# Few different numbers, so that there are ties; and neighbours in float16.
SCORES = st.sampled_from([0.0, -0.0, 0.25, 0.5, 0.50048828125, 1.0, -3.0, 6.0e-8, 1.2e-7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@given(data=st.data())
def test_the_top_k_mask_takes_the_first_of_equal_scores(dtype: torch.dtype, data: st.DataObject):
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
def test_expert_outputs_are_summed_by_weight(rows: int, max_channels: int, biased: bool):
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


def normed(x: np.ndarray, weight: np.ndarray, eps: float, axis: int) -> np.ndarray:
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    return x / np.sqrt((x**2).mean(axis, keepdims=True) + eps) * weight.reshape(shape)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("largest", [25_000.0, 60_000.0, 1.0, 1e-3, 1e-4])
def test_a_float16_norm_matches_float64(largest: float, eps: float):
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


def picks(model: Any, tokens: Sequence[int], *, balanced: bool = True) -> np.ndarray:
    """The class that each layer's router picks for each token, [layers, T]."""
    with torch.no_grad():
        out = model(torch.tensor([list(tokens)]), output_router_logits=True)
    probabilities = [logits.softmax(-1) for logits in out.router_logits]
    biases = [layer.mlp.gate.balancing_biases if balanced else 0 for layer in model.model.layers]
    return np.stack([(p + b).argmax(-1) for p, b in zip(probabilities, biases, strict=True)])


def test_the_tiny_zaya_uses_every_feature_of_a_router(tmp_path: Path):
    model = TinyModel("zaya", tmp_path).model
    text = np.random.default_rng(1).integers(1, VOCAB, 40)[:23].tolist()
    picked = picks(model, text)
    assert all(len(set(layer)) >= 4 for layer in picked.tolist())
    assert (picked == EXPERTS).any(1).all(), "a layer never skips its experts"
    without = picks(model, text, balanced=False)
    assert (picked != without).any(1).all(), "a layer's balancing biases have no effect"


def test_a_unit_vector_keeps_its_norm_in_float16():
    torch.manual_seed(0)
    directions = torch.randn(1, 3, 128, 2)
    expected = directions * 128**0.5 / directions.norm(dim=2, keepdim=True)
    for size in (1e-3, 1.0, 1e4):
        found = unit((directions * size).half()).float()
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=5e-3, rtol=5e-3)
    # A padding row may be 0. NaN would spread to all slots, because 0 * NaN is NaN.
    assert not unit(torch.zeros(1, 3, 128, 2).half()).any()
