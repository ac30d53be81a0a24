import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafters import Table, TableDrafter
from paceline.drafters.table import KEYS, MAX_ORDER, TOKENS, halves, keys_at, keys_of
from paceline.errors import ModelError
from paceline.storage.files import sha256_of
from paceline.storage.manifest import MANIFEST
from support.drafters import write_toy_table
from support.errors import raises

TEXT = [0, 1, 2, 3, 4, 5] * 8


@given(text=st.lists(st.integers(0, 2**31), max_size=12))
def test_keys_of_a_whole_text_equal_those_of_each_suffix(text: list[int]):
    for order in range(MAX_ORDER):
        at_once = keys_at(np.array(text, np.int64), order).tolist()
        assert at_once == [keys_of(text[: end + 1])[order] for end in range(order, len(text))]


def test_the_longest_context_in_the_table_decides(tmp_path: Path):
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


def test_a_table_draft_ends_where_acceptance_is_unlikely(tmp_path: Path):
    rng = np.random.default_rng(0)
    drafter = TableDrafter(Table.open(write_toy_table(tmp_path, [rng.integers(0, 6, 900)], 6), 6))
    proposal = drafter.propose([3], 100)
    assert 0 < len(proposal.tokens) < 10
    assert np.prod(proposal.probabilities) >= 0.05


def test_an_unknown_context_has_no_draft(tmp_path: Path):
    drafter = TableDrafter(Table.open(write_toy_table(tmp_path, [TEXT], 9), 9))
    assert not drafter.propose([8], 4).tokens
    assert not drafter.propose([], 4).tokens


@pytest.mark.parametrize("vocab_size", [6, 70_000])
def test_tokens_take_two_bytes_where_they_fit(tmp_path: Path, vocab_size: int):
    folder = write_toy_table(tmp_path, [[0, vocab_size - 1] * 8], vocab_size)
    assert np.load(folder / TOKENS).itemsize == (2 if vocab_size == 6 else 4)
    result = Table.open(folder, vocab_size).after([0])
    assert result is not None
    assert result.token == vocab_size - 1


def test_a_table_for_another_vocabulary_is_rejected(toy_table: Path):
    with raises(ModelError, "toy", "6 tokens", "7"):
        Table.open(toy_table, 7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_toy_table(tmp_path, [TEXT], 6)


def record(folder: Path, name: str) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    size = (folder / name).stat().st_size
    manifest["files"][name] = {"bytes": size, "sha256": sha256_of(folder / name)}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_column_of_another_length_or_type_is_rejected(folder: Path):
    np.save(folder / KEYS, np.zeros(3, np.uint16))
    record(folder, KEYS)
    with raises(ModelError, "keys.npy", "[3]", "[2, "):
        Table.open(folder, 6)
    np.save(folder / KEYS, np.zeros(3, np.float32))
    record(folder, KEYS)
    with raises(ModelError, "float32"):
        Table.open(folder, 6)


@given(keys=st.lists(st.integers(0, 2**32 - 1), max_size=9))
def test_keys_are_stored_in_halves_without_loss(keys: list[int]):
    upper, lower = halves(np.array(keys, np.uint32)).tolist()
    assert [(high << 16) + low for high, low in zip(upper, lower, strict=True)] == keys


def test_a_token_beyond_the_vocabulary_is_rejected(folder: Path):
    tokens = np.load(folder / TOKENS)
    tokens[0] = 6
    np.save(folder / TOKENS, tokens)
    record(folder, TOKENS)
    with raises(ModelError, "tokens.npy", "token 6"):
        Table.open(folder, 6)
