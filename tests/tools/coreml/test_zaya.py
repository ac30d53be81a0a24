"""ZAYA1 in the Neural Engine's layout against transformers, on a random tiny checkpoint."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

from paceline.errors import ModelError  # noqa: E402
from paceline.tools.coreml.checkpoint import read_checkpoint  # noqa: E402
from paceline.tools.coreml.families import open_family  # noqa: E402
from paceline.tools.coreml.families.zaya import Zaya, unit  # noqa: E402
from paceline.tools.coreml.family import Family  # noqa: E402
from paceline.tools.coreml.torch_model import TorchModel  # noqa: E402
from support.programs import faults, kinds  # noqa: E402

pytestmark = pytest.mark.coreml

SLOTS, ROWS, LAGS = 64, 4, 2
VOCAB, EXPERTS, LAYERS = 160, 5, 3

SETTINGS: dict[str, Any] = {
    "hidden_size": 48,
    "moe_intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "num_experts": EXPERTS,
    "router_hidden_size": 24,
    "max_position_embeddings": 512,
    # Large enough that queries, keys and routers tell tokens apart.
    "initializer_range": 0.25,
}


class Made:
    """A checkpoint on disk, transformers' own model of it, and what that says of a text."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = transformers.ZayaConfig(**SETTINGS)
        self.folder, self.model = folder, transformers.ZayaForCausalLM(config).eval().float()
        with torch.no_grad():
            for weight in [*self.model.parameters(), *balancing(self.model)]:
                # Scales and biases are all 1 or 0 at first, which would hide one that is not read.
                if weight.dim() == 1:
                    weight.add_(torch.randn_like(weight) * 0.2)
            self.model.model.embed_tokens.weight.mul_(4)
            for layer in self.model.model.layers:
                layer.self_attn.qk_norm.temp.add_(1)
                layer.mlp.gate.router_mlp.out_proj.weight.mul_(2)
                layer.mlp.gate.balancing_biases[:-1] *= 0.4
                layer.mlp.gate.balancing_biases[-1] = 0.15
        self.model.save_pretrained(folder)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = self.model(torch.tensor([list(tokens)])).logits[0].numpy()
        return found

    def picks(self, tokens: Sequence[int], *, balanced: bool = True) -> np.ndarray:
        """The class that each layer's router picks for each token, [layers, T]."""
        with torch.no_grad():
            out = self.model(torch.tensor([list(tokens)]), output_router_logits=True)
        shares = [logits.softmax(-1) for logits in out.router_logits]
        biases = [bias if balanced else 0 for bias in balancing(self.model)]
        return np.stack([(s + b).argmax(-1) for s, b in zip(shares, biases, strict=True)])


def balancing(model: Any) -> list[Any]:
    return [layer.mlp.gate.balancing_biases for layer in model.model.layers]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("zaya"))


@pytest.fixture
def family(made: Made) -> Family:
    return open_family(made.folder, slots=SLOTS, conv_slots=ROWS + LAGS)


@pytest.fixture
def network(family: Family) -> TorchModel:
    return TorchModel(family, slots=SLOTS, rows=ROWS)


@pytest.fixture(scope="module")
def text() -> list[int]:
    return np.random.default_rng(0).integers(0, VOCAB, 23).tolist()


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_the_checkpoint_shows_what_a_router_does(made: Made, text: list[int]):
    picks = made.picks(text)
    assert all(len(set(layer)) >= 4 for layer in picks.tolist())
    assert (picks == EXPERTS).any(1).all(), "a layer never passes by its experts"
    without = made.picks(text, balanced=False)
    assert (picks != without).any(1).all(), "a layer's balancing biases decide nothing"


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_logits_are_those_of_transformers_for_every_block_length(
    made: Made, network: TorchModel, text: list[int], rows: int
):
    found = []
    for at in range(0, len(text), rows):
        block = text[at : at + rows]
        found.append(network.step(block).logits)
        network.keep(len(block))
    close(np.concatenate(found), made.logits(text))


def test_a_prompt_in_blocks_and_then_single_tokens(
    made: Made, network: TorchModel, text: list[int]
):
    found = []
    for block in [text[:4], text[4:8], *([token] for token in text[8:])]:
        found.append(network.step(block).logits)
        network.keep(len(block))
    close(np.concatenate(found), made.logits(text))


def test_rows_that_were_not_kept_leave_no_trace(made: Made, network: TorchModel, text: list[int]):
    expected = made.logits(text)
    at = 0
    while at < len(text):
        here = min(1 + at % 3, len(text) - at)
        found = network.step([*text[at : at + here], *[7] * (ROWS - here)]).logits
        close(found[:here], expected[at : at + here])
        network.keep(here)
        at += here


def test_a_call_may_be_filled_up(made: Made, network: TorchModel, text: list[int]):
    expected = made.logits(text)
    for at, token in enumerate(text):
        close(network.step([token], width=ROWS).logits[0], expected[at])
        network.keep(1)


def test_in_soft_routing_every_expert_has_its_probability(made: Made, text: list[int]):
    config, weights = read_checkpoint(made.folder)
    family = Zaya(config, weights, slots=SLOTS, conv_slots=ROWS + LAGS, routing="soft")
    network = TorchModel(family, slots=SLOTS, rows=ROWS)
    with pytest.MonkeyPatch.context() as patch:
        for layer in made.model.model.layers:
            patch.setattr(layer.mlp, "forward", partial(mix_all, layer.mlp))
        expected = made.logits(text[:12])
    found = []
    for at in range(0, 12, ROWS):
        found.append(network.step(text[at : at + ROWS]).logits)
        network.keep(ROWS)
    close(np.concatenate(found), expected)
    assert np.abs(expected - made.logits(text[:12])).max() > 0.1


def mix_all(block: Any, hidden: Any, state: Any = None) -> Any:
    """What transformers' own router and experts give if all are mixed."""
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
    # A row that fills up a call may be 0: NaN would go from it to all slots, as 0 * NaN is NaN.
    assert not unit(torch.zeros(1, 3, 128, 2).half()).any()


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("layer_types", {"layer_types": ["hybrid_sliding"] * LAYERS, "sliding_window": 8}),
        ("cca_time0", {"cca_time0": 3}),
        ("cca_time1", {"cca_time1": 3}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("attention_bias", {"attention_bias": True}),
        ("lm_head_bias", {"lm_head_bias": True}),
        (
            "rope_type",
            {
                "rope_parameters": {
                    "hybrid": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
                }
            },
        ),
    ],
)
def test_what_is_not_implemented_is_refused(field: str, settings: dict[str, Any]):
    config = transformers.ZayaConfig(**{**SETTINGS, **settings})
    with pytest.raises(ModelError, match=rf"{field}.*expected"):
        Zaya(config, {}, slots=SLOTS, conv_slots=ROWS + LAGS)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_is_converted(family: Family, layer: int):
    pytest.importorskip("coremltools")
    from paceline.tools.coreml.shards import Sizes, convert_layers

    sizes = Sizes(rows=ROWS, slots=SLOTS, conv_slots=ROWS + LAGS)
    program = convert_layers(family, layer, layer + 1, sizes=sizes)._mil_program
    assert faults(program) == []
    assert {"conv", "read_state", "coreml_update_state", "gelu"} <= kinds(program)
