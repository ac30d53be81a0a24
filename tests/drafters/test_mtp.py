"""`mtp` with a target whose next token its head knows: every draft is accepted, or none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.drafters import DrafterResources, DrafterSpec, create, taps
from paceline.drafters.mtp import read_head
from paceline.drafters.mtp.openvino_head import _Request
from paceline.drafters.networks.target import layers_of, read_target
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles
from support.driver import total
from support.errors import raises
from support.heads import LENGTH, answers_in_rounds
from support.mtp import HeadForm, Rounds, perfect_weights, write_head
from support.tiny import write_tiny

EAGLE = HeadForm(heads=4, kv_heads=4, drafted=range(320))
EARLY = HeadForm(heads=4, kv_heads=4, drafted=range(320), taps=(0,))
OWN = HeadForm(own=True, taps=(1,), kv_heads=1, rotary=0.5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file whose model repeats rounds of eight tokens."""
    path = tmp_path_factory.mktemp("rounds") / "rounds.gguf"
    return write_tiny(path, tensors=Rounds().target_tensors())


@pytest.fixture(scope="module")
def engine(target: Path) -> Engine:
    return open_engine("openvino", target, 512, EngineSettings(cache_tokens=2048, taps=(0, 1)))


@pytest.mark.parametrize("reads", ["hidden", "token"])
@pytest.mark.parametrize("form", [EAGLE, EARLY, OWN], ids=["eagle3", "eagle3 early", "qwen3_5"])
@pytest.mark.parametrize("block", [2, 5, 8])
def test_all_drafts_of_a_perfect_head_are_accepted(
    engine: Engine, target: Path, tmp_path: Path, form: HeadForm, reads: str, block: int
):
    weights = perfect_weights(form, Rounds(), reads=reads)
    write_head(tmp_path, form, weights)
    shared = DrafterResources(graph=target)
    ran = answers_in_rounds(engine, f"mtp:{tmp_path},int8=0,length=7", shared, block)
    for one in ran:
        assert one.counters.accepted == one.counters.drafted > 0
        assert one.counters.steps == -(-(LENGTH - 1) // block)


@pytest.mark.parametrize("reads", ["hidden", "token"])
@pytest.mark.parametrize("form", [EAGLE, OWN], ids=["eagle3", "qwen3_5"])
def test_a_head_with_inputs_of_the_position_before_is_never_right(
    engine: Engine,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: HeadForm,
    reads: str,
):
    # Without this, the test above might pass with positions that are not aligned.
    write_head(tmp_path, form, perfect_weights(form, Rounds(), reads=reads))
    run_rows, turn = _Request.run, Rounds().turn.astype(np.float32)

    def late(self: Any, kv: Any, slot: int, tokens: Any, positions: Any, hidden: Any) -> Any:
        if reads == "token":
            tokens = [token // 8 * 8 + (token - 1) % 8 for token in tokens]
        elif self._kind == "tapped":
            parts = np.split(hidden, len(form.taps), axis=1)
            hidden = np.concatenate([part @ turn for part in parts], axis=1)
        return run_rows(self, kv, slot, tokens, positions, hidden)

    monkeypatch.setattr(_Request, "run", late)
    shared = DrafterResources(graph=target)
    ran = answers_in_rounds(engine, f"mtp:{tmp_path},int8=0", shared, 4)
    assert total(ran).drafted > 0
    assert total(ran).accepted == 0


def test_int8_keeps_a_perfect_head_perfect(engine: Engine, target: Path, tmp_path: Path):
    write_head(tmp_path, EAGLE, perfect_weights(EAGLE, Rounds(), reads="hidden"), kind="BF16")
    ran = answers_in_rounds(engine, f"mtp:{tmp_path}", DrafterResources(graph=target), 6)
    assert total(ran).accepted == total(ran).drafted > 0


def test_a_cut_vocabulary_drafts_its_tokens_alone(engine: Engine, target: Path, tmp_path: Path):
    write_head(tmp_path, OWN, perfect_weights(OWN, Rounds(), reads="token"))
    shared = DrafterResources(graph=target)
    ran = answers_in_rounds(engine, f"mtp:{tmp_path},vocab=128", shared, 4)
    assert [one.counters.accepted > 0 for one in ran] == [True, True, False, False]


def test_an_option_of_another_form_is_rejected(target: Path, tmp_path: Path):
    write_head(tmp_path, EAGLE)
    with raises(ModelError, "vocab"):
        create(f"mtp:{tmp_path},vocab=128", DrafterResources(graph=target))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("mtp:x,length=0", "mtp has length=0; expected 1 or more"),
        ("mtp:x,vocab=-1", "mtp has vocab=-1"),
        ("mtp:x,int8=2", "mtp has int8=2; expected 1, or 0 for float32"),
        ("mtp:x,bits=3", "mtp has bits=3; expected 4 or 8"),
        ("mtp:x,window=9", "drafter mtp has no option 'window'; expected bits, int8, length"),
    ],
)
def test_an_invalid_option_is_rejected_before_files_are_opened(spec: str, reason: str):
    with raises(InvalidRequest, reason):
        DrafterSpec.parse(spec)


def test_options_of_another_engine_are_rejected(target: Path, tmp_path: Path):
    write_head(tmp_path, EAGLE)
    with raises(InvalidRequest, "mlx"):
        create(f"mtp:{tmp_path},bits=8", DrafterResources(graph=target))
    with raises(InvalidRequest, "target"):
        create(f"mtp:{tmp_path}", DrafterResources())


def test_a_model_without_a_head_has_no_mtp(target: Path):
    shared = DrafterResources(graph=target, target="rounds")
    for refuse in (create, taps):
        with raises(InvalidRequest, "rounds"):
            refuse("mtp", shared)


def test_auto_has_the_head_that_comes_with_the_model(target: Path, tmp_path: Path):
    write_head(tmp_path, EAGLE)
    shared = DrafterResources(graph=target, shipped={"mtp": tmp_path})
    spec = DrafterSpec.parse("auto").resolve(shared.shipped)
    assert str(spec) == "suffix+mtp"
    assert [drafter.name for drafter in create(spec, shared)] == ["suffix", "mtp"]
    assert taps(spec, shared) == taps("mtp", shared) == (0, 1)


def test_a_head_is_opened_once_per_spec(target: Path, tmp_path: Path):
    write_head(tmp_path, EAGLE)
    shared = DrafterResources(graph=target)
    for spec in ("mtp:{}", "mtp:{},length=2", "suffix+mtp:{}"):
        create(spec.format(tmp_path), shared)
    assert len(shared.heads) == 2


def test_the_layers_of_a_target_are_counted(target: Path, tiny_files: ModelFiles, tmp_path: Path):
    assert layers_of(target) == layers_of(tiny_files.path) == read_target(target).layers == 2
    write_head(tmp_path, OWN)
    assert layers_of(tmp_path) == 2


def test_heads_of_both_forms_are_read_as_written(tmp_path: Path):
    for form in (EAGLE, OWN):
        weights = write_head(tmp_path / str(form.own), form, kind="BF16")
        head = read_head(tmp_path / str(form.own), lambda: 2)
        name = "mtp.fc.weight" if form.own else "fc.weight"
        read = head.weights.join if form.own else head.weights.fuse
        assert read is not None
        assert np.array_equal(read, weights[name])
        assert head.config.taps == tuple(form.taps)
