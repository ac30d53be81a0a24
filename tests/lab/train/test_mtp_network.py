"""The head as it is trained, against a reference, and the form in which it is saved."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.drafters.mtp import HeadConfig, read_config, read_head
from paceline_lab.train.config import head_taps
from support.eagle import head_shapes, random_head, read_as_vllm, reference_logits

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from paceline_lab.train.mtp_checkpoint import save_head  # noqa: E402
from paceline_lab.train.mtp_network import HeadNetwork, Rows  # noqa: E402

pytestmark = pytest.mark.reference

CONFIG = HeadConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    rotary_dims=8,
    vocab_size=30,
    draft_vocab_size=12,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    taps=(1, 4, 6),
    num_target_layers=10,
)
FORMS: dict[str, dict[str, Any]] = {
    "a head for each head's keys": {},
    "shared keys and values": {"num_key_value_heads": 2},
    "one tap": {"taps": (3,)},
    "another RoPE and epsilon": {"rope_theta": 1e4, "rms_norm_eps": 0.1},
}
DEPTH = 4

MakeHead = Callable[..., HeadNetwork]


@pytest.fixture(params=FORMS)
def config(request: pytest.FixtureRequest) -> HeadConfig:
    return replace(CONFIG, **FORMS[request.param])


@pytest.fixture
def weights(config: HeadConfig) -> dict[str, np.ndarray]:
    return random_head(config)


def made(config: HeadConfig, weights: dict[str, np.ndarray], std: Any = None) -> HeadNetwork:
    head = HeadNetwork(config, std, dropout=0.5)
    taken = {name: torch.from_numpy(rows) for name, rows in weights.items()}
    taken["fc.weight"] = taken["fc.weight"] * head.std
    head.load_state_dict(taken)
    return head.double().eval()


def texts(config: HeadConfig, *sizes: tuple[int, int]) -> list[Rows]:
    """Texts with these numbers of rows and first rows that predict."""
    rng = np.random.default_rng(5)
    return [
        Rows(
            torch.from_numpy(rng.normal(size=(count, config.tapped_size))),
            torch.from_numpy(rng.normal(size=(count + 1, config.hidden_size))),
            first,
        )
        for count, first in sizes
    ]


def test_logits_of_every_row_and_step_are_those_of_the_reference(
    config: HeadConfig, weights: dict[str, np.ndarray]
):
    batch = texts(config, (9, 3), (6, 0), (14, 11))
    with torch.no_grad():
        found = made(config, weights)(batch, DEPTH)
    assert len(found) == DEPTH
    for step, logits in enumerate(found):
        expected = []
        for text in batch:
            count = len(text.tapped)
            for row in range(text.first, count - 1):
                places = [min(at, count) for at in range(1, row + step + 2)]
                expected.append(
                    reference_logits(
                        config,
                        weights,
                        text.tapped[: row + 1].numpy(),
                        [text.embedded[at].numpy() for at in places],
                    )
                )
        np.testing.assert_allclose(logits.numpy(), np.stack(expected), rtol=0, atol=3e-6)


def test_a_row_depends_on_no_later_token_and_on_no_other_text():
    head = made(CONFIG, random_head(CONFIG))
    first, second = texts(CONFIG, (9, 2), (7, 1))
    cut = Rows(first.tapped[:6], first.embedded[:7], first.first)
    with torch.no_grad():
        both = head([first, second], 1)[0]
        alone = head([cut], 1)[0]
    torch.testing.assert_close(both[: len(alone)], alone)


def test_a_checkpoint_undoes_the_scale_of_hidden_states(
    config: HeadConfig, weights: dict[str, np.ndarray]
):
    std = torch.linspace(0.5, 3.0, config.tapped_size, dtype=torch.float64)
    batch = texts(config, (8, 2))
    scaled = made(config, weights, std)
    with torch.no_grad():
        found, expected = scaled(batch, 2)[1], made(config, weights)(batch, 2)[1]
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)
    for name, rows in scaled.weights().items():
        np.testing.assert_allclose(rows.numpy(), weights[name], rtol=1e-6)


def test_dropout_is_in_training_alone():
    head = made(CONFIG, random_head(CONFIG))
    batch = texts(CONFIG, (8, 2))
    with torch.no_grad():
        assert torch.equal(head(batch, 1)[0], head(batch, 1)[0])
        head.train()
        assert not torch.equal(head(batch, 1)[0], head(batch, 1)[0])


def test_a_head_runs_in_bf16_as_it_does_on_a_gpu():
    head = made(CONFIG, random_head(CONFIG)).float()
    batch = [
        Rows(*(rows.float() for rows in text[:2]), text.first) for text in texts(CONFIG, (8, 2))
    ]
    with torch.no_grad():
        expected = head(batch, DEPTH)
        with torch.autocast("cpu", torch.bfloat16):
            found = head(batch, DEPTH)
    assert found[0].dtype == torch.bfloat16
    for step in range(DEPTH):
        torch.testing.assert_close(found[step].float(), expected[step], rtol=0, atol=0.2)


# -- the form --------------------------------------------------------------------------------------


def saved(folder: Path, config: HeadConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    drafted = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19, 23, 27, 28, 29])
    head = made(config, random_head(config))
    save_head(head.weights(), config, drafted, folder, context_length=64)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("taps", "layers", "named"),
    [((1, 14, 26), 30, False), ((1, 4, 6), 10, False), ((0, 2, 5), 10, True)],
    ids=["30 layers", "10 layers", "others"],
)
def test_a_head_is_read_as_vllm_reads_it(
    taps: tuple[int, ...], layers: int, named: bool, tmp_path: Path
):
    shape = replace(CONFIG, taps=taps, num_target_layers=layers)
    config, tensors = saved(tmp_path, shape)
    rows, inputs = read_as_vllm(config, tensors, layers)
    assert rows == [2, 3, 5, 7, 11, 13, 17, 19, 23, 27, 28, 29]
    assert inputs == [tap + 1 for tap in taps]
    assert ("eagle_aux_hidden_state_layer_ids" in config) == named
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == rows
    assert len(tensors["t2d"]) == config["vocab_size"]


def test_a_saved_head_has_its_weights_in_bf16(tmp_path: Path):
    _, tensors = saved(tmp_path, CONFIG)
    for name, rows in random_head(CONFIG).items():
        assert torch.equal(tensors[name], torch.from_numpy(rows).to(torch.bfloat16)), name
    assert set(tensors) == {*head_shapes(CONFIG), "d2t", "t2d"}


@pytest.mark.parametrize("taps", [(1, 4, 6), (0, 2, 5)], ids=["usual", "others"])
def test_a_saved_head_is_one_that_drafts(taps: tuple[int, ...], tmp_path: Path):
    shape = replace(CONFIG, taps=taps, draft_vocab_size=12)
    _, tensors = saved(tmp_path, shape)
    # The form does not say how many layers the target has.
    expected = replace(shape, num_target_layers=None)
    assert read_config(tmp_path, lambda: 10) == expected
    found = read_head(tmp_path, lambda: 10)
    np.testing.assert_array_equal(found.weights.fuse, tensors["fc.weight"].float().numpy())
    assert found.draft_vocab is not None
    assert found.draft_vocab.tolist() == tensors["t2d"].nonzero().flatten().tolist()


def test_transformers_reads_the_config(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config, _ = saved(tmp_path, CONFIG)
    found = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(found, transformers.LlamaConfig)
    assert found.hidden_size == CONFIG.hidden_size
    assert found.head_dim == CONFIG.head_dim
    assert found.draft_vocab_size == CONFIG.draft_vocab_size
    rope = getattr(found, "rope_parameters", None) or {"rope_theta": found.rope_theta}
    assert rope["rope_theta"] == config["rope_theta"]


def test_a_head_taps_what_runtimes_give_it_by_themselves():
    assert head_taps(30) == (1, 14, 26)
    assert head_taps(32) == (1, 15, 28)
    # The output of the last layer is no layer's input.
    assert [head_taps(layers) for layers in (1, 2, 3, 6)] == [(0,), (0,), (0, 1), (1, 2)]
