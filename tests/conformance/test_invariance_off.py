"""Row invariance disabled in each engine: both checks must detect it, or they prove nothing.

`measure_invariance` is what `exact` rests on; `row_checks` is the first part of `verify`.
"""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.engines import EngineSettings
from paceline.engines.exact import BLOCK_LENGTH
from paceline.engines.rows import RowRange, RowRules
from paceline.verify import checks
from paceline.verify.checks import Verdict, row_checks, run_checks
from support import metal, mlx, tiny
from support.engine_rows import differing
from support.ggml import quantize
from support.llamacpp import library
from support.tiny import SIZES, WIDE, Type, write_tiny


def test_verification_detects_inexact_single_rows_in_llamacpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from paceline.engines.llamacpp.engine import LlamaCppEngine

    monkeypatch.setattr(checks, "CONTEXTS", (16, 264))
    monkeypatch.setattr(checks, "THRESHOLDS", ())
    sizes = {**SIZES, "d": 576, "heads": 9, "kv_heads": 3}
    path = write_tiny(tmp_path / "m.gguf", sizes=sizes)
    settings = EngineSettings(cache_tokens=2048, threads=1)
    values = {}
    for least in (1, 2):
        rules = RowRules(RowRange(least, 16), RowRange(64, 256))
        binding = library("ik_llama.cpp")
        engine = LlamaCppEngine(path, 512, settings, binding=binding, rules=rules)
        with closing(engine):
            verdict = Verdict()
            run_checks(row_checks(engine, verdict))
            values[least] = verdict.conditions[BLOCK_LENGTH].differing
    assert values[2] == 0 < values[1]


def test_verification_detects_a_different_llama_cpp_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from paceline.engines.llamacpp.engine import LlamaCppEngine

    monkeypatch.setattr(tiny, "quantize", partial(quantize, library("llama.cpp")))
    path = write_tiny(tmp_path / "m.gguf", sizes=WIDE, weights=Type.Q4_K)
    settings = EngineSettings(cache_tokens=2048, threads=1)
    values = {}
    for rules in (None, RowRules(RowRange(2, 16), RowRange(64, 256))):
        binding = library("llama.cpp")
        engine = LlamaCppEngine(path, 512, settings, binding=binding, rules=rules)
        with closing(engine):
            assert rules or engine.rules.decode == RowRange(2, 7)
            values[rules is None] = differing(engine)
    assert values[True] == (0, 0)
    assert values[False][0]


@pytest.mark.mlx
def test_verification_detects_an_mlx_engine_that_breaks_its_row_rules(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    mlx.needs()
    import mlx.core as mx

    from paceline_mlx.engine import MlxEngine
    from paceline_mlx.rows import ANY

    original = mx.fast.scaled_dot_product_attention

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        # As a chip of this kind computes eight heads that share keys: up to four rows in a kernel.
        kernel = metal.attention("g", metal.Shape(8, 1), k.shape[2], q.shape[2])
        off = 1 if kernel == ("one pass",) else 1.01
        return original(q, k, v, **options) * mx.array(off, q.dtype)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    folder = mlx.checkpoint(tmp_path_factory.mktemp("mlx") / "llama", "llama", **sizes)
    engine = MlxEngine(folder, mlx.CONTEXT, EngineSettings(cache_tokens=4 * mlx.CONTEXT))
    assert engine.rules.decode == RowRange(1, 4)
    assert differing(engine) == (0, 0)
    engine.rules = ANY
    verdict = Verdict()
    run_checks(row_checks(engine, verdict))
    assert verdict.conditions[BLOCK_LENGTH].differing
    engine.rules = mlx.rules(1, 2)
    monkeypatch.setattr(
        mx.fast,
        "scaled_dot_product_attention",
        lambda q, k, v, **options: original(q, k, v, **options) * (1 + 0.01 * (q.shape[2] > 1)),
    )
    assert all(differing(engine))


@pytest.mark.coreml
def test_verification_detects_an_emulator_with_another_summation_order(
    tiny_core_ml: Any, monkeypatch: pytest.MonkeyPatch
):
    from paceline_coreml.engine.engine import CoreMlEngine
    from paceline_coreml.rehearsal.ops import products

    dots = products.dots

    def by_place(a: Any, b: Any) -> Any:
        """The terms of every second row, and column, are added from the last to the first."""
        array, backwards = dots(a, b), dots(a[..., ::-1], b[..., ::-1])
        array[..., 1::2, :] = backwards[..., 1::2, :]
        array[..., :, 1::2] = np.where(
            np.arange(array.shape[-2])[:, None] % 2, array[..., :, 1::2], backwards[..., :, 1::2]
        )
        return array

    engine = CoreMlEngine(tiny_core_ml, EngineSettings(), rounding="f32")
    assert differing(engine) == (0, 0)
    monkeypatch.setattr(products, "dots", by_place)
    assert all(differing(CoreMlEngine(tiny_core_ml, EngineSettings(), rounding="f32")))
