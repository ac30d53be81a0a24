"""Building blocks of all families, each against the plain formula."""

from collections.abc import Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from paceline_coreml.conversion.layers import (  # noqa: E402
    Attention,
    ConvState,
    LayerInputs,
    RMSNorm,
    apply_rope,
    query_order,
)
from paceline_coreml.conversion.torch_model import layer_inputs  # noqa: E402
from paceline_coreml.engine.inputs import CallInputs  # noqa: E402

pytestmark = pytest.mark.coreml

SLOTS, ROWS = 32, 4


def tables(r: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(SLOTS)[:, None] / 10.0 ** np.linspace(0, 2, r)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def step_at(start: int, rows: int, *, width: int | None = None, lags: int = 0) -> LayerInputs:
    inputs = CallInputs(width or rows, *tables(4), conv_slots=ROWS + lags if lags else 0, lags=lags)
    return layer_inputs({name: torch.from_numpy(a) for name, a in inputs.at(start, rows).items()})


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


def test_a_norm_of_a_small_row_in_float16_is_that_of_float64():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1, 64, 3, 1))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True) * 1e-3).astype(np.float16)
    norm = RMSNorm(torch.ones(64), 1e-6).half()
    expected = normed(x, np.ones(64), 1e-6, 1)
    np.testing.assert_allclose(norm(torch.from_numpy(x)).numpy(), expected, rtol=4e-3, atol=1e-5)


@pytest.mark.parametrize("size", [8, 14])
@pytest.mark.parametrize("rows", [1, 3])
def test_rope_rotates_the_first_dimensions_by_halves(rows: int, size: int):
    x = torch.randn(1, 2, size, rows, generator=torch.Generator().manual_seed(0))
    step = step_at(5, rows)
    found = apply_rope(x, step, size, 8).numpy()
    # A pair (i, i + r) is a complex number, rotated by the angle of its position.
    pairs = x[:, :, :4].numpy() + 1j * x[:, :, 4:8].numpy()
    pairs *= (step.cos.numpy() + 1j * step.sin.numpy()).T
    np.testing.assert_allclose(found[:, :, :4], pairs.real, atol=1e-6)
    np.testing.assert_allclose(found[:, :, 4:8], pairs.imag, atol=1e-6)
    np.testing.assert_array_equal(found[:, :, 8:], x[:, :, 8:].numpy())


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 3), (4, 4), (4, 1)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_query_head_i_attends_to_the_keys_of_its_group(heads: int, kv_heads: int, rows: int):
    size, length = 5, 12
    rng = np.random.default_rng(3)
    q = rng.normal(size=(heads, length, size)).astype(np.float32)
    k, v = rng.normal(size=(2, kv_heads, length, size)).astype(np.float32)
    attention = Attention(heads, kv_heads, size, SLOTS)
    order = query_order(heads, kv_heads, size)
    found = []
    for start in range(0, length, rows):
        block = slice(start, start + rows)
        # Channels [heads * size, T] in the checkpoint's order, then in `query_order`.
        channels = torch.from_numpy(q[:, block]).transpose(1, 2).reshape(heads * size, -1)
        out = attention(
            channels[order].view(1, heads, size, -1),
            torch.from_numpy(k[:, block]).transpose(1, 2)[None],
            torch.from_numpy(v[:, block]).transpose(1, 2)[None],
            step_at(start, rows),
        )
        back = torch.empty(heads * size, rows)
        back[order] = out[0, :, :, 0]
        found.append(back.view(heads, size, rows).transpose(1, 2).numpy())

    for head in range(heads):
        group = head // (heads // kv_heads)
        scores = q[head] @ k[group].T / np.sqrt(size)
        scores[np.triu_indices(length, 1)] = -np.inf
        shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        expected = shares @ v[group]
        np.testing.assert_allclose(np.concatenate(found, 1)[head], expected, atol=1e-5)


@pytest.mark.parametrize("lags", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("keeps", [[1], [1, 2, 4], [4, 0, 3, 0, 0, 1]])
def test_a_conv_state_gives_the_rows_before_despite_rejected_rows(
    lags: int, width: int, keeps: Sequence[int]
):
    channels, rng = 3, np.random.default_rng(4)
    window = ConvState(channels, ROWS + lags)
    text = [np.zeros(channels, np.float32)] * lags  # before the first row
    number = 0
    while (start := len(text) - lags) + width <= SLOTS and number < 40:
        block = rng.normal(size=(width, channels)).astype(np.float32)
        rows = rng.integers(1, width + 1)  # the others are padding
        x = torch.from_numpy(block.T.copy()).view(1, channels, width, 1)
        found = window(x, step_at(start, rows, width=width, lags=lags), lags)
        before = np.array([*text, *block])
        for lag, shifted in enumerate(found, start=1):
            first = len(text) - lag
            got = shifted[0, :, :rows, 0].T.numpy()
            np.testing.assert_allclose(got, before[first : first + rows], atol=1e-6)
        text += list(block[: min(keeps[number % len(keeps)], rows)])
        number += 1
