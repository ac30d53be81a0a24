"""The drafters that come with paceline are whole, and small enough to come with it."""

from pathlib import Path

import pytest

import paceline
from paceline.drafters import DrafterSpec, Table, shipped
from paceline.models.names import REGISTRY
from paceline.storage.files import read_json, sha256_of

FOLDERS = [folder for name in REGISTRY for folder in shipped(name).values()]


def test_drafters_come_with_the_default_model_and_with_no_other():
    assert "table" in shipped("smollm2-135m")
    assert shipped("some/other") == {}
    folder = Path(paceline.__file__).parent / "drafters" / "shipped"
    assert {path.name for path in folder.iterdir()} <= set(REGISTRY)


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}"
)
def test_a_shipped_drafter_is_as_it_was_made(folder: Path):
    files = read_json(folder / "manifest.json")["files"]
    assert {name: sha256_of(folder / name) for name in files} == {
        name: record["sha256"] for name, record in files.items()
    }
    assert sum((folder / name).stat().st_size for name in files) < 30e6


def test_the_table_of_the_default_model_opens_and_is_its_own():
    folder = shipped("smollm2-135m")["table"]
    table = Table.open(folder, 49152)
    assert sum(table.after([token]) is not None for token in range(1000)) > 500
    assert read_json(folder / "manifest.json")["target"] == "smollm2-135m"
    assert str(DrafterSpec.parse("auto").resolve(shipped("smollm2-135m"))) == "suffix+table"
