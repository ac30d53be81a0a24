import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.models.manifest import (
    GGUF_WEIGHTS,
    TOKENIZER,
    Facts,
    changed_files,
    read_manifest,
    write_manifest,
)
from paceline.storage.manifest import MANIFEST
from support.errors import raises

RECORD = {"bytes": 1, "sha256": "0" * 64}
FACTS = Facts(512, (0, 2), 1, True, "<s>", None, "cc0-1.0")
SOURCE = {"kind": "gguf", "from": "/somewhere/é.gguf"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (GGUF_WEIGHTS, TOKENIZER):
        (tmp_path / name).write_text(f"the {name}")
    write_manifest(tmp_path, "a model", SOURCE, FACTS)
    return tmp_path


def change(folder: Path, **values: Any) -> None:
    """Change values of a manifest, or facts in it; `...` removes one."""
    content = json.loads((folder / MANIFEST).read_text())
    for name, value in values.items():
        place = content["facts"] if name in content["facts"] else content
        place.pop(name) if value is ... else place.update({name: value})
    (folder / MANIFEST).write_text(json.dumps(content))


def fault_of(folder: Path) -> str:
    with raises(ModelError, folder / MANIFEST, lines=5) as caught:
        read_manifest(folder)
    return str(caught.value)


def test_what_is_written_is_read_back(folder: Path):
    manifest = read_manifest(folder)
    assert (manifest.name, manifest.source, manifest.facts) == ("a model", SOURCE, FACTS)
    assert manifest.made_by.startswith("paceline ")
    assert {name: record.bytes for name, record in manifest.files.items()} == {
        name: len(f"the {name}") for name in (GGUF_WEIGHTS, TOKENIZER)
    }
    assert changed_files(folder, manifest) == []


def test_a_manifest_with_its_facts_beside_the_other_values_is_read(folder: Path):
    content = json.loads((folder / MANIFEST).read_text())
    facts = content.pop("facts")
    content["format"] = content.pop("kind")
    (folder / MANIFEST).write_text(json.dumps({**content, **facts}))
    assert read_manifest(folder).facts == FACTS


def test_the_fingerprint_is_that_of_the_weights_alone(folder: Path):
    before = read_manifest(folder).fingerprint
    (folder / TOKENIZER).write_text("another")
    write_manifest(folder, "another name", {}, FACTS)
    assert read_manifest(folder).fingerprint == before
    (folder / GGUF_WEIGHTS).write_text("others")
    write_manifest(folder, "a model", SOURCE, FACTS)
    assert read_manifest(folder).fingerprint != before


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"kind": "other"}, r"kind: .*'paceline-model' or 'coreml-model', not 'other'"),
        ({"kind": ...}, "kind: "),
        ({"version": 2}, "version: .*1, not 2"),
        ({"source": {"kind": 1}}, r"source\.kind: .*not 1"),
        ({"context_length": 0}, "context_length: .*1, not 0"),
        ({"stop_token_ids": [1, -1]}, r"stop_token_ids\.1: .*not -1"),
        ({"bos_token_id": None}, "add_bos is true but there is no bos_token_id"),
        ({"eos_token": ...}, "eos_token: "),
        ({"files": []}, r"files: .*not \[\]"),
        ({"files": {}}, f"files does not list .*{GGUF_WEIGHTS}"),
        ({"files": {"x": {**RECORD, "bytes": -1}}}, r"files\.x\.bytes: "),
        ({"files": {"x": {**RECORD, "sha256": "12"}}}, r"files\.x\.sha256: "),
        ({"files": {"/etc/passwd": RECORD}}, "'/etc/passwd', expected a file in this folder"),
        ({"files": {"a/../../b": RECORD}}, "'a/../../b', expected a file in this folder"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], fault: str, folder: Path):
    change(folder, **values)
    assert re.search(fault, fault_of(folder))
