"""Rows of matrices of real width, in groups: the same bits whatever the number of rows in a call.

Tiny models do not show it: OpenVINO changes its kernel with 576 inputs and more.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.engines.invariance import CONDITIONS
from paceline.engines.openvino.batch import parts_of
from paceline.verify import rows as verify_rows
from paceline.verify.checks import Verdict
from paceline.verify.rows import check_rows
from support.tiny_checkpoints import write_gguf_of

WIDE: dict[str, Any] = {
    **{"head_dim": 128, "hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 8},
    "num_hidden_layers": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("inputs", [128, 6144])
def test_rows_of_wide_matrices_do_not_depend_on_how_they_are_computed(
    weights: str, inputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "m.gguf"
    write_gguf_of("qwen3", path, weights=weights, **WIDE, intermediate_size=inputs)
    check_all_conditions(path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["lfm2", "qwen3_5_text"])
def test_rows_of_wide_hybrids_do_not_depend_on_how_they_are_computed(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Their prompts are cut at states that are not committed yet.
    path = tmp_path / "m.gguf"
    wide = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    write_gguf_of(form, path, weights="int4", **wide, intermediate_size=6144)
    check_all_conditions(path, monkeypatch)


def check_all_conditions(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("openvino", path, 512, EngineSettings(cache_tokens=700))
    monkeypatch.setattr(verify_rows, "_CONTEXTS", (64,))
    monkeypatch.setattr(verify_rows, "_CHUNKS", (3, 16, 31))
    monkeypatch.setattr(verify_rows, "_THRESHOLDS", (512,))
    verdict = Verdict()
    check_rows(engine, verdict)
    assert verdict.conditions.keys() == {*CONDITIONS}
    assert {
        name: value.differing for name, value in verdict.conditions.items() if not value.holds
    } == {}


def cut(*blocks: tuple[int, int, bool], most: int = 10) -> Sequence[Any]:
    """Parts of a call of blocks (tokens, rows, prefill): block, first slot, tokens, rows."""
    call: Any = [
        (None, Block(range(count), rows, prefill=prefill), 100) for count, rows, prefill in blocks
    ]
    return [
        [(number, past - 100, len(block.tokens), block.rows) for number, (_, block, past) in part]
        for part in parts_of(call, most)
    ]


def test_a_prompt_is_cut_and_its_last_rows_are_wanted():
    assert cut((25, 1, True)) == [[(0, 0, 10, 0)], [(0, 10, 10, 0)], [(0, 20, 5, 1)]]
    assert cut((21, 21, True)) == [[(0, 0, 10, 10)], [(0, 10, 10, 10)], [(0, 20, 1, 1)]]
    assert cut((12, 4, True)) == [[(0, 0, 10, 2)], [(0, 10, 2, 2)]]
    assert cut((10, 0, True)) == [[(0, 0, 10, 0)]]


def test_blocks_of_decode_stay_whole():
    assert cut((4, 4, False), (4, 4, False), (4, 4, False)) == [
        [(0, 0, 4, 4), (1, 0, 4, 4)],
        [(2, 0, 4, 4)],
    ]
    assert cut((12, 12, False)) == [[(0, 0, 10, 10)], [(0, 10, 2, 2)]]  # longer than a part
    assert cut((4, 4, False), (9, 1, True), (2, 2, False)) == [
        [(0, 0, 4, 4), (1, 0, 6, 0)],
        [(1, 6, 3, 1), (2, 0, 2, 2)],
    ]


def test_no_part_of_a_prompt_is_one_row_in_a_full_part():
    assert cut((9, 9, False), (3, 1, True)) == [[(0, 0, 9, 9)], [(1, 0, 3, 1)]]


@given(
    blocks=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.booleans()), min_size=1),
    most=st.integers(2, 20),
)
def test_parts_are_the_call_in_order(blocks: list[tuple[int, int, bool]], most: int):
    blocks = [(count, min(rows, count), prefill) for count, rows, prefill in blocks]
    parts = cut(*blocks, most=most)
    for number, (count, rows, _) in enumerate(blocks):
        pieces = [piece for part in parts for piece in part if piece[0] == number]
        assert [past for _, past, _, _ in pieces] == [
            sum(result[2] for result in pieces[:at]) for at in range(len(pieces))
        ]
        assert sum(result[2] for result in pieces) == count
        results = [
            past + at for _, past, item, last in pieces for at in range(item) if at >= item - last
        ]
        assert results == list(range(count - rows, count))
    for part in parts:
        assert sum(item for _, _, item, _ in part) <= most
        assert [number for number, *_ in part] == sorted({number for number, *_ in part})
