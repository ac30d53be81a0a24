"""Which rows the calls of a model may have, measured of models whose kernels differ."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings
from paceline.engines.exact import BLOCK_LENGTH, measure_invariance
from paceline.engines.rows import RowRange
from paceline_mlx.engine import MlxEngine
from paceline_mlx.hooks import install_hook
from paceline_mlx.model import LoadedModel, load
from paceline_mlx.probe import choose_rows
from paceline_mlx.rows import ALONE, ANY, Budget, agree, shares, used
from support import mlx

pytestmark = pytest.mark.mlx


def test_attention_agrees_where_every_call_that_rules_allow_gave_a_position_the_same_bits():
    seen = {
        (1, 0): [b"a"],
        (2, 0): [b"A", b"b"],
        (4, 0): [b"A", b"b", b"c", b"d"],
        (8, 0): [b"A", b"b", b"c", b"D", b"e", b"f", b"g", b"h"],
        (4, 3): [b"d", b"e", b"f", b"g"],
    }
    ranges = [(1, 1), (1, 2), (2, 4), (2, 8), (8, 8)]
    assert [agree(mlx.rules(*rows), seen) for rows in ranges] == [True, False, True, False, True]
    # Of a call across a threshold, rows are read up to it if the rest is padding.
    assert [used(mlx.rules(2, 8), count, 1021) for count in (1, 2, 3, 8)] == [0, 1, 0, 0]
    crossing = {(8, 1018): [b"a"] * 8, (2, 1021): [b"b", b"c"]}
    assert agree(mlx.rules(2, 8), crossing), "no block leads to the first"


@pytest.mark.parametrize("rows", [RowRange(1, 32), RowRange(2, 4), RowRange(2, 2)])
def test_each_sequence_has_rows_of_its_range_in_a_call_of_several(rows: RowRange):
    for total in range(2, 33):
        if counts := shares(rows, total):
            assert sum(counts) == total
            assert len(counts) > 1
            assert all(rows.least <= count <= rows.most for count in counts)
    assert shares(RowRange(8, 8), 14) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return mlx.checkpoint(tmp_path_factory.mktemp("mlx") / "llama", "llama", head_dim=16, **sizes)


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


@pytest.mark.parametrize(
    ("off", "expected"),
    [
        (lambda rows, held: 0.01 * (rows > 4), RowRange(1, 4)),
        (lambda rows, held: 0.01 * (rows == 1) + 0.02 * (rows > 8), RowRange(2, 8)),
        (lambda rows, held: 0.01 * rows, RowRange(8, 8)),
        # By its place in the call.
        (lambda rows, held: 0.01 * np.arange(rows)[:, None], None),
        # One row alone, behind thousands of slots.
        (lambda rows, held: 0.01 * (held > 4096 and rows == 1), RowRange(2, 8)),
    ],
    ids=["above 4", "one, above 8", "all", "place", "far"],
)
def test_the_cheapest_row_range_that_agrees_is_chosen(
    folder: Path, off: Off, expected: RowRange | None, request: pytest.FixtureRequest
):
    # Thousands of slots are read only where kernels of long contexts differ.
    context = 8192 if request.node.callspec.id == "far" else 512
    rules = choose_rows(with_kernels(folder, off), context, Budget())
    assert (rules and rules.decode) == expected


def test_a_short_context_is_looked_at_as_far_as_it_goes(folder: Path):
    def far(rows: int, held: int) -> float:
        return 0.01 * (held > 4096 and rows == 1)

    for context in (4000, 16):
        rules = choose_rows(with_kernels(folder, far), context, Budget())
        assert rules is not None and rules.decode == (1, 32)


def test_calls_with_the_numbers_that_were_chosen_are_measured_exact(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    model = with_kernels(folder, lambda rows, held: 0.01 * rows)
    monkeypatch.setattr("paceline_mlx.engine.LoadedModel", lambda *_: model)
    engine = MlxEngine(folder, mlx.CONTEXT, EngineSettings(cache_tokens=512))
    assert (engine.rules.decode, engine.min_rows) == ((8, 8), 2)
    assert measure_invariance(engine)[BLOCK_LENGTH].holds
    engine.rules = ANY
    assert not measure_invariance(engine)[BLOCK_LENGTH].holds


def test_where_no_numbers_agree_rows_run_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    model = with_kernels(folder, lambda rows, held: 0.01 * np.arange(rows)[:, None])
    monkeypatch.setattr("paceline_mlx.engine.LoadedModel", lambda *_: model)
    engine = MlxEngine(folder, mlx.CONTEXT, EngineSettings(cache_tokens=512))
    # With fewer than two rows at least, no answer is said to be exact; and drafts change none.
    assert (engine.rules, engine.min_rows) == (ALONE, 1)
    assert measure_invariance(engine)[BLOCK_LENGTH].holds


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
    assert (engine.rules.decode, engine.min_rows) == ((1, 8), 2)
    return engine


def read(engine: MlxEngine, sequence: Any, prompt: Sequence[int]) -> None:
    engine.step([(sequence, Block(prompt, 0, prefill=True))])
    sequence.commit(len(prompt))


def decoded(engine: MlxEngine, sequence: Any, tokens: Sequence[int]) -> np.ndarray:
    for at in range(0, len(tokens), 4):
        part = tokens[at : at + 4]
        logits = engine.step([(sequence, Block(part, 1))]).logits[0].copy()
        sequence.commit(len(part))
    return logits


def test_after_a_failed_call_rows_are_run_again_in_the_role_they_had(two_kernels: MlxEngine):
    text = np.random.default_rng(1).integers(0, mlx.VOCAB, 60).tolist()
    with closing(two_kernels.open()) as one, closing(two_kernels.open()) as other:
        for item in (one, other):
            read(two_kernels, item, text[:25])
            decoded(two_kernels, item, text[25:])
        other.forget()  # as after a call that failed
        rows = [decoded(two_kernels, entry, [5, 6, 7]) for entry in (one, other)]
    assert rows[0].tobytes() == rows[1].tobytes()
