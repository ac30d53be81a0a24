"""Specs of DFlash drafters: folder, options and taps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.drafters import DrafterResources, DrafterSpec, create, taps
from paceline.drafters.dflash import Config
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles
from support.dflash import tiny_config, write_checkpoint
from support.errors import raises
from support.networks import Case


@pytest.fixture
def config(tiny_files: ModelFiles) -> Config:
    return tiny_config(tiny_files)


@pytest.fixture
def checkpoint(config: Config, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, config)
    return tmp_path


def test_a_network_is_opened_once_per_spec(case: Case):
    shared = DrafterResources(graph=case.files.path)
    for spec in ("dflash:{}", "dflash:{},int8=0", "suffix+dflash:{}", "dflash:{}"):
        create(spec.format(case.folder), shared)
    assert len(shared.networks) == 2


def test_a_shipped_drafter_needs_no_folder(case: Case):
    shared = DrafterResources(graph=case.files.path, shipped={"dflash": case.folder})
    for spec in ("dflash", "dflash:", "dflash:window=64", "dflash:int8=0,window=64"):
        assert [drafter.name for drafter in create(spec, shared)] == ["dflash"]
        assert taps(spec, shared) == (0, 1)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("dflash:x,window=0", "dflash has window=0; expected 1 or more"),
        ("dflash:x,window=-3", "dflash has window=-3"),
        ("dflash:x,window=all", "option window is 'all'; expected a number"),
        ("dflash:x,window", "option window is ''; expected a number"),
        ("dflash:x,int8=2", "dflash has int8=2; expected 1, or 0 for float32"),
        ("dflash:x,int8=yes", "option int8 is 'yes'"),
        ("dflash:x,block=4", "drafter dflash has no option 'block'; expected bits, int8, window"),
        ("dflash:x,bits=3", "dflash has bits=3; expected 4 or 8"),
        ("dflash:block=4", "drafter dflash has no option 'block'"),
        ("dflash:x,y", "drafter dflash has no option 'y'"),
        ("ngram+dflash:x,int8=2", "dflash has int8=2"),
    ],
)
def test_an_invalid_option_is_rejected_before_files_are_opened(spec: str, reason: str):
    for refuse in (DrafterSpec.parse, create, lambda spec: taps(spec, DrafterResources())):
        with raises(InvalidRequest, reason):
            refuse(spec)


@pytest.mark.parametrize("spec", ["dflash", "dflash:", "dflash:window=64", "suffix+dflash"])
def test_without_a_shipped_drafter_a_folder_is_required(spec: str, tiny_files: ModelFiles):
    DrafterSpec.parse(spec)
    shared = DrafterResources(target="tiny", graph=tiny_files.path)
    for refuse in (create, taps):
        with raises(InvalidRequest, "tiny", "dflash:FOLDER"):
            refuse(spec, shared)


def test_bits_are_for_targets_in_mlx(case: Case):
    with raises(InvalidRequest, "bits=4", "mlx", "int8=1"):
        create(f"dflash:{case.folder},bits=4", DrafterResources(graph=case.files.path))


def test_a_target_in_mlx_has_its_drafter_in_mlx(case: Case, tmp_path: Path):
    target: Any = object()  # is not asked for anything before the checkpoint was found
    shared = DrafterResources(mlx=target)
    with raises(InvalidRequest, "int8", "bits=8"):
        create(f"dflash:{case.folder},int8=1", shared)
    with raises(ModelError, "config.json"):
        create(f"dflash:{tmp_path},bits=4", shared)


def test_a_target_without_a_graph_is_rejected(checkpoint: Path):
    with raises(InvalidRequest, "embeddings"):
        create(f"dflash:{checkpoint}", DrafterResources())


def test_taps_are_those_of_all_drafters(config: Config, tmp_path: Path):
    for name, ids in (("one", (3, 1)), ("other", (5, 3))):
        deep = replace(config, num_target_layers=6, target_layer_ids=ids)
        write_checkpoint(tmp_path / name, deep)
    one, other = f"dflash:{tmp_path / 'one'}", f"dflash:{tmp_path / 'other'},window=8"
    shared = DrafterResources()
    assert taps(one, shared) == (1, 3)
    assert taps(f"{other}+suffix", shared) == (3, 5)
    assert taps(f"{one}+ngram+{other}", shared) == (1, 3, 5)


@pytest.mark.parametrize("spec", ["none", "suffix", "ngram:max=2", "table:x"])
def test_other_drafters_need_no_taps(spec: str):
    assert taps(spec, DrafterResources()) == ()


def test_a_missing_folder_is_named(tmp_path: Path, tiny_files: ModelFiles):
    shared = DrafterResources(graph=tiny_files.path)
    for refuse in (create, taps):
        with raises(ModelError, "nothing", "config.json"):
            refuse(f"dflash:{tmp_path / 'nothing'}", shared)
