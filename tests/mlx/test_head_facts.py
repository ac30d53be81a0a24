"""Which published head a folder has."""

from pathlib import Path

import pytest

from paceline.drafters import HeadFacts, read_facts
from paceline.errors import ModelError
from support.dflash import tiny_config, write_checkpoint, write_config
from support.errors import raises
from support.mtp import HeadForm, write_head
from support.networks import CHAINED


@pytest.mark.parametrize("form", CHAINED)
def test_a_block_head_names_its_form_and_its_target(tmp_path: Path, form: str):
    write_checkpoint(tmp_path, tiny_config(**CHAINED[form]))
    named = "DFlash 2" if form.startswith("dflash") else "DSpark"
    assert read_facts(tmp_path) == HeadFacts("dflash", named, 64, 320, 2)


def test_a_chain_head_names_its_form(tmp_path: Path):
    write_head(tmp_path / "own", HeadForm(drafted=range(9)))
    write_head(tmp_path / "deepspec", HeadForm(deepspec=True))
    assert read_facts(tmp_path / "own") == HeadFacts("mtp", "EAGLE-3", 64, 320, None)
    assert read_facts(tmp_path / "deepspec") == HeadFacts("mtp", "EAGLE-3", 64, 320, 2)


@pytest.mark.parametrize("name", ["Gemma4DSparkModel", "Qwen3ForCausalLM", 5])
def test_another_architecture_is_no_head(tmp_path: Path, name: object):
    write_config(tmp_path, {"architectures": [name]})
    assert read_facts(tmp_path) is None
    assert read_facts(tmp_path / "nothing") is None


def test_a_faulty_head_is_refused(tmp_path: Path):
    write_config(tmp_path, {"architectures": ["DFlashDraftModel"]})
    with raises(ModelError, "hidden_size", lines=10):
        read_facts(tmp_path)
