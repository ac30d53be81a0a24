"""Which numbers of rows the calls of a model may have."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings
from paceline.engines.invariance import BLOCK_LENGTH, measure_invariance
from paceline_mlx.engine import MlxEngine
from paceline_mlx.hooks import install_hook
from paceline_mlx.model import LoadedModel, load
from paceline_mlx.probe import choose_rows
from paceline_mlx.rows import ANY, CANDIDATES, TRIED, RowRange, agree, shares
from support import mlx


@pytest.mark.parametrize(
    ("rows", "count", "position", "lengths"),
    [
        (RowRange(1, 32), 1, 0, [1]),
        (RowRange(1, 8), 8, 0, [8]),
        (RowRange(2, 4), 9, 100, [4, 4, 1]),
        (RowRange(8, 8), 17, 0, [8, 8, 1]),
        (RowRange(8, 8), 0, 0, []),
        # At 1,024 and 1,025 keys, and nowhere else near, MLX may change kernels.
        (RowRange(1, 8), 8, 1018, [5, 1, 2]),
        (RowRange(2, 8), 8, 1018, [4, 1, 3]),
        (RowRange(8, 8), 8, 1016, [1, 7]),
        (RowRange(2, 8), 8, 1014, [8]),
        (RowRange(2, 8), 8, 1023, [8]),
        (RowRange(2, 8), 4, 16380, [2, 2]),
    ],
)
def test_a_block_is_cut_into_calls(rows: RowRange, count: int, position: int, lengths: list[int]):
    parts = [list(range(count))[part] for part in rows.split(count, position)]
    assert [len(part) for part in parts] == lengths
    assert [row for part in parts for row in part] == list(range(count))


SEEN = {
    (1, 0): [b"a"],
    (2, 0): [b"A", b"b"],
    (4, 0): [b"A", b"b", b"c", b"d"],
    (8, 0): [b"A", b"b", b"c", b"D", b"e", b"f", b"g", b"h"],
    (4, 3): [b"d", b"e", b"f", b"g"],
}


@pytest.mark.parametrize(
    ("rows", "same"),
    [
        (RowRange(1, 2), False),
        (RowRange(2, 4), True),
        (RowRange(1, 1), True),
        (RowRange(2, 8), False),  # the fourth position
        (RowRange(8, 8), True),
        (RowRange(16, 16), True),  # none were looked at
    ],
)
def test_rows_agree_where_every_call_gave_a_position_the_same_bits(rows: RowRange, same: bool):
    assert agree(rows, SEEN) is same


def test_candidates_are_among_the_numbers_that_are_tried():
    assert {number for rows in CANDIDATES for number in rows} <= {*TRIED}


def test_rows_of_a_call_across_a_threshold_are_read_up_to_it_if_the_rest_is_padding():
    assert [RowRange(2, 8).used(count, 1021) for count in (1, 2, 3, 8)] == [0, 1, 0, 0]
    crossing = {(8, 1018): [b"a"] * 8, (2, 1021): [b"b", b"c"]}
    assert agree(RowRange(2, 8), crossing), "no block leads to the first"


@pytest.mark.parametrize("rows", [ANY, RowRange(1, 8), RowRange(2, 4), RowRange(2, 2)])
def test_each_sequence_has_rows_of_its_range_in_a_call_of_several(rows: RowRange):
    for total in range(2, 33):
        counts = shares(rows, total)
        if counts:
            assert sum(counts) == total
            assert len(counts) > 1
            assert all(rows.least <= count <= rows.most for count in counts)
    assert shares(RowRange(8, 8), 14) == []


# -- of a model whose kernels differ ---------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlx.checkpoint(tmp_path_factory.mktemp("mlx") / "llama", "llama", num_hidden_layers=1)


Off = Callable[[int, int], Any]
"""By how much each row's logits are off: of a call with so many rows behind so many slots."""


def with_kernels(folder: Path, off: Off) -> LoadedModel:
    """A model whose rows depend on how they are computed, as `off` says."""
    import mlx.core as mx

    model = LoadedModel(load(folder))

    def hook(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        held = kwargs["cache"][0].offset
        rows = args[0].shape[1]
        return call(*args, **kwargs) + mx.array(np.float32(off(rows, held)))

    install_hook(model.module, hook)
    return model


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("off", "expected"),
    [
        (lambda rows, held: 0, ANY),
        (lambda rows, held: 0.01 * (rows > 8), RowRange(1, 8)),
        (lambda rows, held: 0.01 * (rows > 4), RowRange(1, 4)),
        (lambda rows, held: 0.01 * (rows == 1) + 0.02 * (rows > 8), RowRange(2, 8)),
        (lambda rows, held: 0.01 * (rows == 1) + 0.02 * (rows > 4), RowRange(2, 4)),
        (lambda rows, held: 0.01 * rows, RowRange(8, 8)),
        # By its place in the call.
        (lambda rows, held: 0.01 * np.arange(rows)[:, None], None),
        # One row alone, behind thousands of slots.
        (lambda rows, held: 0.01 * (held > 4096 and rows == 1), RowRange(2, 8)),
    ],
    ids=["none", "above 8", "above 4", "one, above 8", "one, above 4", "all", "place", "far"],
)
def test_the_cheapest_row_range_that_agrees_is_chosen(
    folder: Path, off: Off, expected: RowRange | None, request: pytest.FixtureRequest
):
    # Thousands of slots are read only where kernels of long contexts differ.
    context = 8192 if request.node.callspec.id in ("none", "far") else 512
    assert choose_rows(with_kernels(folder, off), context) == expected


@pytest.mark.mlx
def test_a_short_context_is_looked_at_as_far_as_it_goes(folder: Path):
    def far(rows: int, held: int) -> float:
        return 0.01 * (held > 4096 and rows == 1)

    assert choose_rows(with_kernels(folder, far), 4000) == ANY
    assert choose_rows(with_kernels(folder, far), 16) == ANY


@pytest.mark.mlx
def test_calls_with_the_numbers_that_were_chosen_are_measured_exact(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    model = with_kernels(folder, lambda rows, held: 0.01 * rows)
    monkeypatch.setattr("paceline_mlx.engine.LoadedModel", lambda *_: model)
    engine = MlxEngine(folder, mlx.CONTEXT, EngineSettings(cache_tokens=512))
    assert (engine.rows, engine.min_rows) == (RowRange(8, 8), 2)
    assert measure_invariance(engine)[BLOCK_LENGTH].holds
    engine.rows = ANY
    assert not measure_invariance(engine)[BLOCK_LENGTH].holds


@pytest.mark.mlx
def test_where_no_numbers_agree_nothing_is_promised(folder: Path, monkeypatch: pytest.MonkeyPatch):
    model = with_kernels(folder, lambda rows, held: 0.01 * np.arange(rows)[:, None])
    monkeypatch.setattr("paceline_mlx.engine.LoadedModel", lambda *_: model)
    engine = MlxEngine(folder, mlx.CONTEXT, EngineSettings(cache_tokens=512))
    # With fewer than two rows at least, no answer is said to be exact.
    assert (engine.rows, engine.min_rows) == (ANY, 1)


# -- whose kernels differ between a prompt and an answer -------------------------------------------


@pytest.fixture
def two_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MlxEngine:
    """Keys and values of calls with more than eight rows are off a little, as on a GPU."""
    import mlx.core as mx

    model = LoadedModel(load(folder))

    def hook(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return call(*args, **kwargs) * mx.array(np.float32(1.001 if args[0].shape[-1] > 8 else 1))

    install_hook(model.module.model.embed_tokens, hook)
    monkeypatch.setattr("paceline_mlx.engine.LoadedModel", lambda *_: model)
    engine = MlxEngine(folder, mlx.CONTEXT, EngineSettings(cache_tokens=4 * mlx.CONTEXT))
    assert (engine.rows, engine.min_rows) == (RowRange(1, 8), 2)
    return engine


def read(engine: MlxEngine, sequence: Any, prompt: Sequence[int]) -> None:
    engine.step([(sequence, Block(prompt, 0, prefill=True))])
    sequence.commit(len(prompt))


def decoded(engine: MlxEngine, sequence: Any, tokens: Sequence[int]) -> np.ndarray:
    """Run and keep an answer's tokens; the last row of logits."""
    for at in range(0, len(tokens), 4):
        part = tokens[at : at + 4]
        logits = engine.step([(sequence, Block(part, 1))]).logits[0].copy()
        sequence.commit(len(part))
    return logits


@pytest.mark.mlx
def test_an_answers_keys_and_values_are_not_shared_as_a_prompts(two_kernels: MlxEngine):
    text = np.random.default_rng(0).integers(0, mlx.VOCAB, 60).tolist()
    with closing(two_kernels.open()) as first, closing(two_kernels.open()) as fresh:
        read(two_kernels, first, text[:20])
        decoded(two_kernels, first, text[20:60])
        assert (first.length, first.shareable_length) == (60, 20)
        with closing(first.fork(60)) as child:
            assert child.length == child.shareable_length <= 20
            read(two_kernels, child, text[child.length :])
            read(two_kernels, fresh, text)
            rows = [decoded(two_kernels, item, [5, 6, 7]) for item in (child, fresh)]
        assert rows[0].tobytes() == rows[1].tobytes()
        first.rewind(30)
        assert first.shareable_length == 20
        first.rewind(10)
        assert first.shareable_length == 10


@pytest.mark.mlx
def test_after_a_failed_call_rows_are_run_again_in_the_role_they_had(two_kernels: MlxEngine):
    text = np.random.default_rng(1).integers(0, mlx.VOCAB, 60).tolist()
    with closing(two_kernels.open()) as one, closing(two_kernels.open()) as other:
        for item in (one, other):
            read(two_kernels, item, text[:25])
            decoded(two_kernels, item, text[25:])
        other.forget()  # as after a call that failed
        rows = [decoded(two_kernels, entry, [5, 6, 7]) for entry in (one, other)]
    assert rows[0].tobytes() == rows[1].tobytes()
