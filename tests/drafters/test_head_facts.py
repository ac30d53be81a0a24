"""Which published head a folder has, and which targets it fits."""

from pathlib import Path

import pytest

from paceline.drafters.heads import HeadFacts, is_head, misfit, read_facts
from paceline.drafters.networks.target import TargetSizes, read_target, sizes_of
from paceline.errors import ModelError
from paceline.models import ModelFiles
from support.dflash import tiny_config, write_checkpoint, write_config
from support.errors import raises
from support.mtp import HeadForm, write_head
from support.networks import CHAINED


@pytest.mark.parametrize("form", CHAINED)
def test_a_block_head_names_its_form_and_its_target(
    tiny_files: ModelFiles, tmp_path: Path, form: str
):
    write_checkpoint(tmp_path, tiny_config(tiny_files, **CHAINED[form]))
    named = "DFlash 2" if form.startswith("dflash") else "DSpark"
    assert read_facts(tmp_path) == HeadFacts(named, "dflash", 64, 320, 2)


def test_a_chain_head_names_its_form(tmp_path: Path):
    write_head(tmp_path / "own", HeadForm(drafted=range(9)))
    write_head(tmp_path / "deepspec", HeadForm(deepspec=True))
    assert read_facts(tmp_path / "own") == HeadFacts("EAGLE-3", "mtp", 64, 320, None)
    assert read_facts(tmp_path / "deepspec") == HeadFacts("EAGLE-3", "mtp", 64, 320, 2)


def test_sizes_of_a_gguf_file_are_those_of_its_graph(tiny_files: ModelFiles, tiny_gguf: Path):
    assert sizes_of(tiny_gguf) == sizes_of(tiny_files.path) == TargetSizes(2, 64, 320)
    target = read_target(tiny_files.path)
    assert sizes_of(tiny_files.path) == (target.layers, target.hidden_size, target.vocab_size)


def test_every_size_that_differs_is_named(tmp_path: Path):
    facts = HeadFacts("DSpark", "dflash", 64, 320, 2)
    assert misfit(tmp_path, facts, TargetSizes(2, 64, 320)) is None
    why = misfit(tmp_path, facts, TargetSizes(28, 1024, 320)) or ""
    assert "hidden size is 64, the target's 1024" in why
    assert "number of target layers is 2, the target's 28" in why
    assert "vocabulary" not in why


@pytest.mark.parametrize("name", ["Gemma4DSparkModel", "Qwen3ForCausalLM", 5])
def test_another_architecture_is_no_head(tmp_path: Path, name: object):
    write_config(tmp_path, {"architectures": [name]})
    assert not is_head(tmp_path)
    with raises(ModelError, "DFlashDraftModel"):
        read_facts(tmp_path)
    assert not is_head(tmp_path / "nothing")
