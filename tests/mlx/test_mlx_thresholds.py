"""Whole models whose attention takes the kernels of a large Apple chip: rows near 1,024 keys."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings
from paceline.engines.rows import RowRules
from paceline_mlx import caches
from paceline_mlx.engine import MlxEngine
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
    """Attention is off a little, by the kernel that a Max would take for heads of 128."""
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
    """Logits of the rows from START to STOP, run from `start` in blocks of which 2 are rejected."""
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
def test_rows_across_a_threshold_are_those_of_plain_decoding(
    family: str, checkpoint_of: mlx.Checkpoints
):
    measured = None if family == "llama" else mlx.rules(3, 8)
    engine = opened(checkpoint_of(family, **MODELS[family]), measured)
    # Of four heads two share keys: beyond 1,024 of them, three rows and more take one kernel.
    assert (engine.min_rows, engine.rules.decode) == (2, (3, 8))
    plain = near_the_threshold(engine, START, [1] * (STOP - START))
    for first in (1, 4, 5, 6):
        drafted = near_the_threshold(engine, START, [first, *[8] * 4])
        assert drafted.tobytes() == plain.tobytes(), first


def test_rows_across_a_threshold_differ_where_calls_cross_it(
    checkpoint_of: mlx.Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    engine = opened(checkpoint_of("llama", **MODELS["llama"]))
    engine.rules = engine.rules._replace(cuts=())
    monkeypatch.setattr(caches, "dropped", lambda *_: 0)
    plain = near_the_threshold(engine, START, [1] * (STOP - START))
    drafted = near_the_threshold(engine, START, [8] * 5)
    assert drafted.tobytes() != plain.tobytes()


def test_a_cache_whose_slots_are_no_function_of_the_position_promises_nothing(
    checkpoint_of: mlx.Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("paceline_mlx.probe.kernel_by_position", lambda _: False)
    assert opened(checkpoint_of("llama")).min_rows == 1
    assert MlxEngine(checkpoint_of("llama"), 512).min_rows == 2, (
        "no threshold is within its context"
    )
