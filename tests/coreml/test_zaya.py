"""ZAYA1's router and experts, beyond the conformance suite of all families."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline_coreml.conversion.families.zaya import unit
from support.coreml_families import EXPERTS, VOCAB, TinyModel

pytestmark = pytest.mark.coreml


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel("zaya", tmp_path_factory.mktemp("zaya"))


@pytest.fixture(scope="module")
def text() -> list[int]:
    return np.random.default_rng(1).integers(1, VOCAB, 40)[:23].tolist()


def picks(model: Any, tokens: Sequence[int], *, balanced: bool = True) -> np.ndarray:
    """The class that each layer's router picks for each token, [layers, T]."""
    with torch.no_grad():
        out = model(torch.tensor([list(tokens)]), output_router_logits=True)
    probabilities = [logits.softmax(-1) for logits in out.router_logits]
    biases = [layer.mlp.gate.balancing_biases if balanced else 0 for layer in model.model.layers]
    return np.stack([(p + b).argmax(-1) for p, b in zip(probabilities, biases, strict=True)])


def test_the_tiny_model_uses_every_feature_of_a_router(made: TinyModel, text: list[int]):
    picked = picks(made.model, text)
    assert all(len(set(layer)) >= 4 for layer in picked.tolist())
    assert (picked == EXPERTS).any(1).all(), "a layer never skips its experts"
    without = picks(made.model, text, balanced=False)
    assert (picked != without).any(1).all(), "a layer's balancing biases have no effect"


def test_a_unit_vector_is_one_in_float16_too():
    torch.manual_seed(0)
    directions = torch.randn(1, 3, 128, 2)
    expected = directions * 128**0.5 / directions.norm(dim=2, keepdim=True)
    for size in (1e-3, 1.0, 1e4):
        found = unit((directions * size).half()).float()
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=5e-3, rtol=5e-3)
    # A padding row may be 0. NaN would spread to all slots, because 0 * NaN is NaN.
    assert not unit(torch.zeros(1, 3, 128, 2).half()).any()
