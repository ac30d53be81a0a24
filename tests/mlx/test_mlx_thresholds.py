"""Whole models whose attention takes the kernels of a large Apple chip: rows near 1,024 keys.

Further on a device that plans each shape of attention for 200 ms, as cuDNN does.
"""

from collections.abc import Sequence
from contextlib import closing
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings
from paceline.engines.rows import RowRules
from paceline.errors import InvalidRequest
from paceline.storage.progress import Progress
from paceline_mlx.engine import MlxEngine
from paceline_mlx.model import LoadedModel, load
from paceline_mlx.rows import FEW_SHAPES
from support import metal, mlx
from support.mlx_rows import step

pytestmark = pytest.mark.mlx

CONTEXT = 1400
START, STOP = 1012, 1034
TEXT = [(7 * i + i * i) % mlx.VOCAB for i in range(CONTEXT)]

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": HEADS,
    "lfm2": {},
    "qwen3_5": HEADS,
    "gemma3": {**HEADS, "sliding_window": 512, "sliding_window_pattern": 1},
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention differs slightly by the kernel that a Max chip would use for heads of 128."""
    import mlx.core as mx

    original = mx.fast.scaled_dot_product_attention
    known: dict[object, int] = {}

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        shape = metal.Shape(q.shape[1], k.shape[1])
        masked = isinstance(options.get("mask"), mx.array)
        kernel = metal.attention("s", shape, k.shape[2], q.shape[2], masked=masked)
        number = known.setdefault(kernel, len(known))
        return original(q, k, v, **options) * mx.array(1 + number / 512, q.dtype)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)


def opened(folder: Path, rules: RowRules | None = None) -> MlxEngine:
    return MlxEngine(folder, CONTEXT, EngineSettings(cache_tokens=4 * CONTEXT), rules=rules)


def near_the_threshold(engine: MlxEngine, start: int, cuts: Sequence[int]) -> np.ndarray:
    """Return the logits of rows START to STOP; blocks from `start` have their last 2 rejected."""
    values: dict[int, np.ndarray] = {}
    with closing(engine.open()) as sequence:
        engine.step([(sequence, Block(TEXT[:start], 0, prefill=True))])
        sequence.commit(start)
        for count in cuts:
            at = sequence.length
            kept = max(count - 2, 1)
            logits = step(engine, sequence, TEXT[at : at + count])
            values.update(enumerate(logits[:kept], at))
            sequence.commit(kept)
    return np.stack([values[at] for at in range(START, STOP)])


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma3"),
        *(pytest.param(family, marks=pytest.mark.soak) for family in ("lfm2", "qwen3_5")),
    ],
)
def test_rows_across_a_threshold_match_plain_decoding(family: str, checkpoint_of: mlx.Checkpoints):
    measured = None if family == "llama" else mlx.rules(3, 8)
    engine = opened(checkpoint_of(family, **MODELS[family]), measured)
    # Of four heads two share keys: beyond 1,024 of them, three rows and more take one kernel.
    assert (engine.min_rows, engine.rules.decode) == (2, (3, 8))
    plain = near_the_threshold(engine, START, [1] * (STOP - START))
    for first in (1, 4, 5, 6):
        drafted = near_the_threshold(engine, START, [first, *[8] * 4])
        assert drafted.tobytes() == plain.tobytes(), first


def test_a_cache_with_slots_independent_of_position_is_not_exact(
    checkpoint_of: mlx.Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline_mlx.probe.kernel_by_position", lambda _: False)
    assert opened(checkpoint_of("llama")).min_rows == 1
    assert MlxEngine(checkpoint_of("llama"), 512).min_rows == 2, (
        "no threshold is within its context"
    )


# -- a device that plans shapes --------------------------------------------------------------------


@pytest.fixture
def planned(kernels: None, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Shapes of attention so far: each advances the clock by 0.2 seconds."""
    import mlx.core as mx

    attention = mx.fast.scaled_dot_product_attention
    shapes = set[Any]()

    def planning(q: Any, k: Any, v: Any, **options: Any) -> Any:
        mask = options.get("mask")
        shapes.add((*q.shape, *k.shape, mask if isinstance(mask, str) else mask is None))
        return attention(q, k, v, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", planning)
    for clock in ("paceline_mlx.engine.process_time", "paceline_mlx.rows.perf_counter"):
        monkeypatch.setattr(clock, lambda: 0.2 * len(shapes))
    return shapes


def test_no_shape_is_planned_during_a_response(
    checkpoint_of: mlx.Checkpoints, planned: set[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline_mlx.model.plans_shapes", lambda: True)
    engine = opened(checkpoint_of("gemma3"))
    assert (engine.rules._replace(together=1), engine.min_rows) == (FEW_SHAPES, 2)
    assert engine.compared_keys == inf
    assert 0.2 * len(planned) <= 10
    known = set(planned)
    plain = near_the_threshold(engine, START, [1] * (STOP - START))
    drafted = near_the_threshold(engine, START, [8] * 4)
    assert drafted.tobytes() == plain.tobytes()
    assert planned == known


def test_measuring_ends_after_ten_seconds_and_longer_contexts_are_not_exact(
    checkpoint_of: mlx.Checkpoints, planned: set[Any], monkeypatch: pytest.MonkeyPatch
):
    said = StringIO()
    settings = EngineSettings(progress=Progress(said))
    engine = MlxEngine(checkpoint_of("llama"), CONTEXT, settings)
    assert 0.2 * len(planned) < 10.4
    assert 0 < engine.compared_keys < CONTEXT
    assert f"over {engine.compared_keys} tokens: in 10 s" in said.getvalue()
    assert "PACELINE_MLX_SECONDS=60 allows" in said.getvalue()
    monkeypatch.setenv("PACELINE_MLX_SECONDS", "x")
    with pytest.raises(InvalidRequest, match="PACELINE_MLX_SECONDS: 'x'"):
        MlxEngine(checkpoint_of("llama"), CONTEXT, settings)


def test_padded_keys_are_masked(
    checkpoint_of: mlx.Checkpoints, monkeypatch: pytest.MonkeyPatch, planned: set[Any]
):
    import mlx.core as mx

    shape = [1, 2, 9, 16]
    q, k, v = (mx.random.normal(shape, key=mx.random.key(seed)) for seed in range(3))
    causal = mx.tril(mx.ones([9, 9], mx.bool_))
    masks = [None, "causal", causal, mx.where(causal, 0.0, -mx.inf)]

    def outputs() -> list[np.ndarray]:
        attention = mx.fast.scaled_dot_product_attention
        return [np.array(attention(q, k, v, scale=1.0, mask=mask)) for mask in masks]

    expected = outputs()
    monkeypatch.setattr("paceline_mlx.model.plans_shapes", lambda: True)
    LoadedModel(load(checkpoint_of("llama")))
    np.testing.assert_allclose(outputs(), expected, atol=1e-2)
    assert (*shape, 1, 2, 1024, 16, False) in planned
