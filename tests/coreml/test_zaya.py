"""ZAYA1's router and experts, beyond the conformance suite of all families."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

from paceline_coreml.conversion.checkpoint import read_checkpoint  # noqa: E402
from paceline_coreml.conversion.families.zaya import Zaya, unit  # noqa: E402
from support.coreml_families import EXPERTS, ROWS, SLOTS, VOCAB, TinyModel  # noqa: E402
from support.coreml_torch import TorchModel  # noqa: E402

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


def test_in_soft_routing_every_expert_has_its_probability(made: TinyModel, text: list[int]):
    config, weights = read_checkpoint(made.folder)
    family = Zaya(config, weights, slots=SLOTS, conv_slots=ROWS + made.lags, routing="soft")
    network = TorchModel(family, slots=SLOTS, rows=ROWS)
    with pytest.MonkeyPatch.context() as patch:
        for layer in made.model.model.layers:
            patch.setattr(layer.mlp, "forward", partial(mix_all, layer.mlp))
        expected = made.logits(text[:12])
    found = []
    for at in range(0, 12, ROWS):
        found.append(network.step(text[at : at + ROWS]).logits)
        network.keep(ROWS)
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4, rtol=1e-4)
    assert np.abs(expected - made.logits(text[:12])).max() > 0.1


def mix_all(block: Any, hidden: Any, state: Any = None) -> Any:
    """transformers' experts, all weighted by their probabilities."""
    logits, _, _, state = block.gate(hidden, router_states=state)
    shares, rows = logits.softmax(-1), hidden.flatten(0, 1)
    mixed = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        chosen = torch.full((len(rows), 1), expert)
        mixed += block.experts(rows, chosen, shares[:, expert : expert + 1])
    return mixed.view_as(hidden), state


def test_a_unit_vector_is_one_in_float16_too():
    torch.manual_seed(0)
    directions = torch.randn(1, 3, 128, 2)
    expected = directions * 128**0.5 / directions.norm(dim=2, keepdim=True)
    for size in (1e-3, 1.0, 1e4):
        found = unit((directions * size).half()).float()
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=5e-3, rtol=5e-3)
    # A padding row may be 0. NaN would spread to all slots, because 0 * NaN is NaN.
    assert not unit(torch.zeros(1, 3, 128, 2).half()).any()
