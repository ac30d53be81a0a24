"""Checkpoints as transformers itself writes and reads them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from paceline.models.checkpoints.convert import plan, write
from support.tiny_checkpoints import FORMS, write_checkpoint, write_tokenizer

pytestmark = pytest.mark.reference

# transformers has no minicpm, and keeps MXFP4 on a GPU alone.
KNOWN = sorted(FORMS.keys() - {"minicpm", "gpt_oss-mxfp4"})


def load(folder: Path) -> Any:
    """The model, and what did not fit between the checkpoint and it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if json.loads((folder / "config.json").read_text())["model_type"] not in (
        transformers.models.auto.configuration_auto.CONFIG_MAPPING
    ):
        pytest.skip("this version of transformers does not have the family")
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    return model, {kind: names for kind, names in about.items() if names}


def converted(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    path = folder / "model.gguf"
    write(plan(folder, "f32"), path, lambda _done: None)
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor.data for tensor in reader.tensors}


@pytest.mark.parametrize("form", KNOWN)
def test_transformers_finds_every_tensor_of_a_tiny_checkpoint_and_no_other(
    form: str, tmp_path: Path
):
    _, misfits = load(write_checkpoint(form, tmp_path))
    assert misfits == {}


@pytest.mark.parametrize("form", KNOWN)
def test_what_transformers_writes_makes_the_same_file(form: str, tmp_path: Path):
    """Names, layouts and config.json as the installed version saves them."""
    here, there = write_checkpoint(form, tmp_path / "here"), tmp_path / "there"
    model, _ = load(here)
    model.save_pretrained(there)
    write_tokenizer(there / "tokenizer.json")
    fields, tensors = converted(here)
    saved_fields, saved_tensors = converted(there)
    assert saved_fields == fields
    assert saved_tensors.keys() == tensors.keys()
    assert all((saved_tensors[name] == tensors[name]).all() for name in tensors)
