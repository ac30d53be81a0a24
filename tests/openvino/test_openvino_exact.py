"""Row invariance switched off in the engine openvino: both checks of it must find that."""

import pytest

from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.engines.exact import BLOCK_LENGTH, measure_invariance
from paceline.models import ModelFiles
from paceline.verify.checks import Verdict, row_checks, run_checks
from paceline_openvino import engine as engine_module


def differing(engine: Engine) -> tuple[int, int]:
    """Rows that differ by block length, as each of the two checks counts them."""
    verdict = Verdict()
    run_checks(row_checks(engine, verdict))
    measured = measure_invariance(engine, (BLOCK_LENGTH,))
    return verdict.conditions[BLOCK_LENGTH].differing, measured[BLOCK_LENGTH].differing


def test_single_rows_of_the_openvino_engine_are_found(tiny_ir: ModelFiles):
    values = {}
    for min_rows in (1, 2):
        settings = EngineSettings(min_rows=min_rows, cache_tokens=2048)
        engine = open_engine("openvino", tiny_ir.path, tiny_ir.context_length, settings)
        values[min_rows] = differing(engine)
    assert all(values[1])
    assert values[2] == (0, 0)


def test_an_eight_bit_kv_cache_of_the_openvino_engine_is_found(
    tiny_ir: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        engine_module, "_KV_PRECISION", "u8"
    )  # a scale for 32 slots of a key's channel
    settings = EngineSettings(cache_tokens=2048)
    engine = open_engine("openvino", tiny_ir.path, tiny_ir.context_length, settings)
    assert engine.describe()["kv_cache"] == "u8"
    assert all(differing(engine))
