"""The network as it is trained, against the paper once more and against what runs it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.drafters.dflash import Config, OpenVinoNetwork, read_config
from paceline.drafters.dflash.checkpoint import read_draft_vocab, read_weights
from paceline.models import ModelFiles
from support.dflash import Ends, ends_of, random_weights, reference_draft, tiny_config

torch = pytest.importorskip("torch")

from paceline.tools.train.checkpoint import save_checkpoint  # noqa: E402
from paceline.tools.train.network import Network  # noqa: E402

pytestmark = pytest.mark.reference

FORMS: dict[str, dict[str, Any]] = {
    "one layer": {"num_hidden_layers": 1},
    "two layers": {},
    "three layers with a window in the middle": {
        "num_hidden_layers": 3,
        "windows": (None, 20, None),
    },
    "a window shorter than a block": {"windows": (3, None)},
    "heads wider than the hidden states": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
    },
    "another block, RoPE and epsilon": {
        "block_size": 16,
        "rope_theta": 500.0,
        "rms_norm_eps": 0.1,
    },
}

TOKENS = [3, 77, 150]
"""The first of each block."""


@pytest.fixture(params=FORMS)
def config(request: pytest.FixtureRequest, tiny_files: ModelFiles) -> Config:
    return tiny_config(tiny_files, **FORMS[request.param])


@pytest.fixture(scope="module")
def ends(tiny_files: ModelFiles) -> Ends:
    return ends_of(tiny_files)


@pytest.fixture
def network(config: Config) -> Network:
    return made(config)


def made(config: Config, seed: int = 0) -> Network:
    """A network with weights that a checkpoint can hold exactly."""
    weights = {
        name: torch.from_numpy(rows).bfloat16().float()
        for name, rows in random_weights(config, seed).items()
    }
    network = Network(config)
    network.load(weights)
    return network.eval()


def features(config: Config, length: int, texts: int = 1) -> np.ndarray:
    rng = np.random.default_rng(length)
    return rng.normal(size=(texts, length, config.tapped_size)).astype(np.float32)


def hidden(
    network: Network, ends: Ends, rows: np.ndarray, anchors: Sequence[Sequence[int]]
) -> np.ndarray:
    """[S, A, B, d] for blocks that begin with TOKENS at anchors [S, A]."""
    config = network.config
    tokens = np.full((*np.shape(anchors), config.block_size), config.mask_token_id)
    tokens[..., 0] = TOKENS[: np.shape(anchors)[1]]
    embedded = torch.from_numpy(ends.embeddings.astype(np.float32)[tokens])
    with torch.no_grad():
        found = network(torch.from_numpy(rows), embedded, torch.tensor(anchors))
    result: np.ndarray = found.numpy()
    return result


def cosines(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of each row."""
    sizes = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
    result: np.ndarray = (found * expected).sum(-1) / sizes
    return result


@pytest.mark.parametrize("anchors", [[0], [1], [5], [100], [100, 40, 1], [60, 64, 61]], ids=str)
def test_blocks_match_the_paper(network: Network, ends: Ends, anchors: list[int]):
    config, rows = network.config, features(network.config, 100)
    found = hidden(network, ends, rows, [anchors])[0]
    weights = {name: tensor.numpy() for name, tensor in network.weights().items()}
    for block, token, anchor in zip(found, TOKENS, anchors, strict=False):
        expected = reference_draft(config, weights, ends, rows[0, :anchor], token, anchor)
        assert cosines(block, expected.hidden).min() >= 0.9999
        np.testing.assert_allclose(block, expected.hidden, atol=2e-3)
        tokens = (block[1:] @ ends.head.T).argmax(-1)
        sure = np.array(expected.margins) > 1e-3
        assert np.array_equal(tokens[sure], np.array(expected.tokens)[sure])


def test_blocks_and_texts_in_one_call_equal_those_alone(network: Network, ends: Ends):
    rows = features(network.config, 50, texts=2)
    anchors = [[10, 12, 45], [3, 30, 49]]
    together = hidden(network, ends, rows, anchors)
    assert together.shape == (2, 3, network.config.block_size, 64)
    for text in range(2):
        for place in range(3):
            # A text of its own, that ends where the block begins.
            alone = Network.forward(
                network,
                torch.from_numpy(rows[text : text + 1, : anchors[text][place]]),
                embedded_block(network.config, ends, TOKENS[place]),
                torch.tensor([[anchors[text][place]]]),
            )
            np.testing.assert_allclose(
                together[text, place], alone.detach().numpy()[0, 0], atol=1e-4
            )


def embedded_block(config: Config, ends: Ends, token: int) -> Any:
    tokens = [token, *[config.mask_token_id] * (config.block_size - 1)]
    return torch.from_numpy(ends.embeddings.astype(np.float32)[tokens])[None, None]


def test_rows_at_and_after_the_anchor_are_masked(network: Network, ends: Ends):
    rows = features(network.config, 50)
    changed = rows.copy()
    changed[:, 20:] = 7.0  # also what fills up a shorter text
    before, after = (hidden(network, ends, each, [[20, 10]]) for each in (rows, changed))
    assert np.array_equal(before, after)
    changed[:, 19] += 1
    assert not np.allclose(before, hidden(network, ends, changed, [[20, 10]]))


def test_a_saved_network_drafts_as_in_training(
    network: Network, ends: Ends, tiny_files: ModelFiles, tmp_path: Path
):
    config = network.config
    save_checkpoint(network.weights(), config, tmp_path)
    runs = OpenVinoNetwork(tmp_path, tiny_files.path, int8=False)
    same, sure = [], []
    for length in (1, 5, 60, 300):
        rows = features(config, length)
        found = hidden(network, ends, rows, [[length] * 3])[0]
        logits = torch.from_numpy(found[:, 1:] @ ends.head.T)
        chances, tokens = logits.softmax(-1).max(-1)
        two = logits.topk(2, -1).values
        for place, token in enumerate(TOKENS):
            context = runs.new_cache()
            drafts, said = runs.draft(context, token, length, rows[0], 0)
            np.testing.assert_allclose(said, chances[place], rtol=1e-3)
            same += (np.array(drafts) == tokens[place].numpy()).tolist()
            sure += (two[place, :, 0] - two[place, :, 1] > 1e-3).tolist()
    assert np.mean(np.array(same)[sure]) >= 0.999
    assert np.mean(same) > 0.98


def test_a_saved_network_is_read_as_it_was(network: Network, tmp_path: Path):
    config = network.config
    save_checkpoint(network.weights(), config, tmp_path)
    assert read_config(tmp_path) == config
    assert read_draft_vocab(tmp_path, config) is None
    for name, rows in read_weights(tmp_path, config).items():
        assert np.array_equal(rows, network.weights()[name].numpy()), name
    save_checkpoint(network.weights(), config, tmp_path, draft_vocab=[3, 5, 300])
    found = read_draft_vocab(tmp_path, config)
    assert found is not None
    assert found.tolist() == [3, 5, 300]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "draft_vocab.npy",
        "model.safetensors",
    ]


def test_a_network_that_is_saved_over_another_has_nothing_of_it(
    tiny_files: ModelFiles, tmp_path: Path
):
    config = tiny_config(tiny_files)
    save_checkpoint(made(config).weights(), config, tmp_path, draft_vocab=[3, 5, 300])
    save_checkpoint(made(config, 1).weights(), config, tmp_path)
    assert read_draft_vocab(tmp_path, config) is None


def test_a_checkpoint_does_not_depend_on_the_scale_of_training(
    network: Network, ends: Ends, tmp_path: Path
):
    config, rows = network.config, features(network.config, 60)
    spread = torch.linspace(0.1, 30, config.tapped_size)
    other = Network(config, spread)
    other.load(network.weights())
    assert not torch.allclose(other.fc.weight, network.fc.weight)
    for name, weight in other.weights().items():
        torch.testing.assert_close(weight, network.weights()[name])
    found, expected = (hidden(each, ends, rows, [[60, 7]]) for each in (other, network))
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_a_new_network_has_the_names_and_shapes_of_a_checkpoint(config: Config):
    found = {name: tuple(rows.shape) for name, rows in Network(config).weights().items()}
    assert found == config.shapes()


def test_half_precision_differs_little(network: Network, ends: Ends):
    rows = features(network.config, 40)
    exactly = hidden(network, ends, rows, [[40, 20]])
    with torch.autocast("cpu", torch.bfloat16):
        roughly = hidden(network, ends, rows, [[40, 20]])
    assert cosines(roughly.astype(np.float32), exactly).mean() > 0.98
