"""Tables of drafts: made ones, and those that come with paceline."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters import DrafterSpec, Table, shipped
from paceline.drafters.table import KEYS, MAX_ORDER, TOKENS, TableDrafter, keys_at, keys_of
from paceline.errors import ModelError
from paceline.models.names import REGISTRY
from paceline.storage.files import read_json, sha256_of
from paceline.storage.manifest import MANIFEST
from support.drafters import write_toy_table
from support.errors import raises

TEXT = [0, 1, 2, 3, 4, 5] * 8


@given(text=st.lists(st.integers(0, 2**31), max_size=12))
def test_keys_of_a_whole_text_match_those_of_each_suffix(text: list[int]):
    for order in range(MAX_ORDER):
        at_once = keys_at(np.array(text, np.int64), order).tolist()
        assert at_once == [keys_of(text[: end + 1])[order] for end in range(order, len(text))]


def test_the_longest_known_context_determines_the_draft(tmp_path: Path):
    texts = [[1, 2, 3] * 9, [4, 2, 5] * 5]
    table = Table.open(write_toy_table(tmp_path, texts, 6), 6)
    after = {context: table.after(context) for context in [(2,), (1, 2), (4, 2), (0, 2)]}
    assert {context: value.token for context, value in after.items() if value} == {
        (2,): 3,
        (1, 2): 3,
        (4, 2): 5,
        (0, 2): 3,  # not in the table: backs off to the shorter context
    }


def test_a_table_draft_continues_while_it_is_likely(tmp_path: Path):
    drafter = TableDrafter(Table.open(write_toy_table(tmp_path, [TEXT], 6), 6))
    proposal = drafter.propose([3], 10)
    assert proposal.tokens == [4, 5, 0, 1, 2, 3, 4, 5, 0, 1]
    assert len(proposal.probabilities) == 10
    assert proposal.source == "table"


def test_a_table_draft_ends_at_unlikely_tokens_or_unknown_contexts(tmp_path: Path):
    rng = np.random.default_rng(0)
    drafter = TableDrafter(Table.open(write_toy_table(tmp_path, [rng.integers(0, 6, 900)], 9), 9))
    proposal = drafter.propose([3], 100)
    assert 0 < len(proposal.tokens) < 10
    assert np.prod(proposal.probabilities) >= 0.05
    assert not drafter.propose([8], 4).tokens
    assert not drafter.propose([], 4).tokens


@pytest.mark.parametrize("vocab_size", [6, 70_000])
def test_small_token_ids_take_two_bytes(tmp_path: Path, vocab_size: int):
    folder = write_toy_table(tmp_path, [[0, vocab_size - 1] * 8], vocab_size)
    assert np.load(folder / TOKENS).itemsize == (2 if vocab_size == 6 else 4)
    result = Table.open(folder, vocab_size).after([0])
    assert result is not None
    assert result.token == vocab_size - 1


@pytest.mark.parametrize(
    ("name", "column", "words"),
    [
        (KEYS, np.zeros(3, np.uint16), ("keys.npy", "[3]", "[2, ")),
        (KEYS, np.zeros(3, np.float32), ("float32",)),
        (TOKENS, None, ("tokens.npy", "token 6")),
    ],
)
def test_an_inconsistent_table_is_rejected(
    name: str, column: np.ndarray | None, words: tuple[str, ...], tmp_path: Path
):
    folder = write_toy_table(tmp_path, [TEXT], 6)
    with raises(ModelError, folder, "6 tokens", "7"):
        Table.open(folder, 7)
    if column is None:  # a token beyond the vocabulary
        column = np.load(folder / name)
        column[0] = 6
    np.save(folder / name, column)
    manifest = json.loads((folder / MANIFEST).read_text())
    size = (folder / name).stat().st_size
    manifest["files"][name] = {"bytes": size, "sha256": sha256_of(folder / name)}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with raises(ModelError, *words):
        Table.open(folder, 6)


FOLDERS = [folder for name in REGISTRY for folder in shipped(name).values()]


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}"
)
def test_shipped_drafters_match_their_checksums(folder: Path):
    files = read_json(folder / "manifest.json")["files"]
    assert {name: sha256_of(folder / name) for name in files} == {
        name: record["sha256"] for name, record in files.items()
    }
    assert sum((folder / name).stat().st_size for name in files) < 30e6


def test_the_default_models_table_opens_and_no_other_model_has_one():
    assert shipped("some/other") == {}
    assert {path.name for path in FOLDERS[0].parents[1].iterdir()} <= set(REGISTRY)
    folder = shipped("smollm2-135m")["table"]
    table = Table.open(folder, 49152)
    assert sum(table.after([token]) is not None for token in range(1000)) > 500
    assert read_json(folder / "manifest.json")["target"] == "smollm2-135m"
    assert str(DrafterSpec.parse("auto").resolve(shipped("smollm2-135m"))) == "suffix+table"
