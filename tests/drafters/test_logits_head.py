"""Heads that read logits: in every engine, what they may be asked, and faults of their files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline.drafters import DrafterResources, create, needs_hidden_states
from paceline.drafters.mtp import read_config, read_head
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest, ModelError
from paceline_lab.train.logits import LogitsReader, joined, spanning_rows, two_levels
from support.driver import total
from support.errors import raises
from support.heads import LENGTH, answers_in_rounds
from support.llamacpp import model_of
from support.logits_heads import DRAFTED, LOGITS_HEAD, write_logits_head
from support.mtp import Rounds, perfect_weights
from support.packages import params
from support.tiny import write_tiny

SHARED = DrafterResources(vocab_size=320)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file whose model repeats rounds of eight tokens."""
    path = tmp_path_factory.mktemp("rounds") / "rounds.gguf"
    return write_tiny(path, tensors=Rounds().target_tensors())


@pytest.fixture(scope="module", params=params(["openvino", "ik_llama.cpp", "llama.cpp"]))
def engine(request: pytest.FixtureRequest, target: Path) -> Engine:
    """Each that runs a GGUF file; none returns a hidden state."""
    if request.param == "openvino":
        return open_engine("openvino", target, 512, EngineSettings(cache_tokens=2048))
    return model_of(target, request.param, 2048).engine


def perfect(folder: Path, reads: str) -> Path:
    """A head that is right after every context, of what it `reads`."""
    rounds = Rounds()
    weights = perfect_weights(replace(LOGITS_HEAD, drafted=range(320)), rounds, reads=reads)
    weights["lm_head.weight"] = rounds.head[DRAFTED]
    write_logits_head(folder, rounds.embeddings, rounds.head, weights)
    return folder


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return perfect(tmp_path / "head", "hidden")


@pytest.mark.parametrize("reads", ["hidden", "token"])
@pytest.mark.parametrize("options", [",int8=0", ""], ids=["float32", "int8"])
def test_all_drafts_of_a_perfect_head_are_accepted(
    engine: Engine, tmp_path: Path, reads: str, options: str
):
    spec = f"mtp:{perfect(tmp_path, reads)},length=3{options}"
    ran = answers_in_rounds(engine, spec, SHARED, 4)
    for one in ran:
        # A round has a token that is not drafted, or none.
        assert one.counters.accepted >= 0.8 * one.counters.drafted > 0
    assert total(ran).steps < 0.5 * len(ran) * LENGTH


def test_options_of_other_forms_and_heads_of_other_vocabularies_are_rejected(head: Path):
    for option in ("vocab=128", "bits=8"):
        with raises(InvalidRequest, option.split("=")[0]):
            create(f"mtp:{head},{option}", SHARED)
    with raises(ModelError, "320 tokens"):
        create(f"mtp:{head}", DrafterResources(vocab_size=321))


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def changed_tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return write


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed_config(rank=0), "rank"),
        (changed_config(draft_vocab_size=320), "draft_vocab_size"),
        (changed_config(logits_of=[320]), "logits_of"),
        (changed_config(logits_of=[]), "logits_of"),
        (changed_tensors(lambda all_: all_.pop("fc.weight")), "fc.weight"),
        (changed_tensors(lambda all_: all_.pop("embeddings.into.scale")), "embeddings.into.scale"),
        (changed_tensors(lambda all_: all_["drafted"].sort()), ""),
        (
            changed_tensors(
                lambda all_: all_.update({"embeddings.into": np.ones((64, 36), np.float32)})
            ),
            "expected I8",
        ),
        (changed_tensors(lambda all_: all_["drafted"].fill(3)), "ascending"),
        (changed_tensors(lambda all_: all_["drafted"].__setitem__(-1, 320)), "vocabulary"),
    ],
)
def test_faults_of_its_files_are_named(change: Callable[[Path], None], reason: str, head: Path):
    change(head)
    if not reason:
        assert read_head(head, lambda: 2).draft_vocab is not None, "as it was"
        return
    with raises(ModelError, reason):
        read_head(head, lambda: 2)


def test_it_needs_nothing_of_its_target(head: Path):
    assert not needs_hidden_states(f"suffix+mtp:{head}")
    assert needs_hidden_states(f"mtp:{head}+mtp:{head.parent}")
    assert needs_hidden_states("mtp")
    config = read_config(head, lambda: pytest.fail("layers are counted"))
    assert (config.taps, config.vocab_size, config.draft_vocab_size) == ((), 320, len(DRAFTED))
    assert len(config.logits_of) == config.tapped_size == round(64 * 4 / 3)


# -- what it is made with --------------------------------------------------------------------------


def test_states_follow_from_logits_and_capped_logits_are_refused():
    rng = np.random.default_rng(0)
    head = rng.normal(size=(300, 48)).astype(np.float32)
    reader = LogitsReader(head, range(1, 301))
    states = rng.normal(size=(5, 48)).astype(np.float32)
    logits = states @ head.T
    assert reader.tokens == sorted({*reader.tokens})
    assert len(reader.tokens) == 64
    np.testing.assert_allclose(reader.states(logits), states, atol=1e-4)
    np.testing.assert_allclose(reader.logits(states), logits, rtol=1e-5)
    reader.check(logits)
    reader.check(3 * logits)
    with pytest.raises(InvalidRequest, match="caps"):
        reader.check(30 * np.tanh(logits / 30))


def test_rows_that_span_are_chosen_and_of_a_lower_rank_no_more():
    rng = np.random.default_rng(1)
    basis = np.eye(6, dtype=np.float32)
    rows = np.concatenate([1e-3 * rng.normal(size=(20, 6)).astype(np.float32), basis])
    assert spanning_rows(rows, 6) == [20, 21, 22, 23, 24, 25]
    assert len(spanning_rows(rows, 8)) == 8
    assert spanning_rows(rows * [1, 1, 1, 1, 0, 0], 6) == [20, 21, 22, 23]


def test_embeddings_of_few_values_are_the_nearest():
    rng = np.random.default_rng(2)
    low = rng.normal(size=(400, 64)) @ rng.normal(size=(64, 80))
    embeddings = (low + 1e-3 * rng.normal(size=low.shape)).astype(np.float32)
    drafted = [3, 50, 399]
    levels = two_levels(embeddings, drafted)
    assert levels.rest.whole.shape == (397, 64)
    found = joined(levels, drafted)
    rounding = np.abs(embeddings).max() / 127
    np.testing.assert_allclose(found[drafted], embeddings[drafted], atol=rounding)
    assert np.abs(found - embeddings).mean() < rounding
