"""A checkpoint's model folder: a GGUF file, and the files about text beside it."""

import json
from pathlib import Path

from paceline.errors import ModelError
from paceline.models import QUIET
from paceline.models.checkpoints.convert import plan, write_folder
from paceline.models.manifest import GGUF_WEIGHTS
from support.errors import raises
from support.tiny_checkpoints import write_checkpoint


def test_a_folder_has_the_weights_and_what_is_read_beside_them(tmp_path: Path):
    source = write_checkpoint("qwen3", tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("not needed")
    work = tmp_path / "work"
    work.mkdir()
    facts = write_folder(plan(source, "int8"), work, QUIET)
    assert {path.name for path in work.iterdir()} == {
        *(GGUF_WEIGHTS, "config.json", "tokenizer.json"),
        *("generation_config.json", "chat_template.jinja"),
    }
    assert facts.context_length == 512
    assert {2, 5} <= {*facts.stop_token_ids}


def test_a_broken_tokenizer_is_found_before_anything_is_written(tmp_path: Path):
    source = write_checkpoint("qwen3", tmp_path / "source")
    (source / "tokenizer.json").write_text(json.dumps({"model": "none"}))
    work = tmp_path / "work"
    work.mkdir()
    with raises(ModelError, "tokenizer.json"):
        write_folder(plan(source, "int8"), work, QUIET)
    assert list(work.iterdir()) == []
