"""The rounding "engine": each property of the Neural Engine that others reported."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline_coreml.rehearsal import RehearsalModel
from support import mil

pytestmark = pytest.mark.coreml

COUNT = 4096
"""Ones whose sum in float16 stops at 2048, unless groups of them are added first."""

Outputs = Callable[[str], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    x = np.linspace(-1, 12, 1041, dtype=np.float32).reshape(1, -1)
    terms = np.full((1, COUNT), 0.1, np.float32)
    inputs = {"x": x.astype(np.float16), "terms": terms.astype(np.float16)}

    def build(mb: Any, x: Any, terms: Any) -> list[Any]:
        ones = np.ones((COUNT, 1), np.float16)
        return [
            mb.silu(x=x, name="silu"),
            mb.mul(x=x, y=np.float16(1e-6), name="tiny"),
            mb.reduce_sum(x=terms, axes=[1], keep_dims=True, name="sum"),
            mb.matmul(x=terms, y=ones, name="product"),
        ]

    path = mil.save_program(tmp_path_factory.mktemp("numerics") / "model.mlpackage", build, inputs)
    return lambda rounding: RehearsalModel(path, rounding=rounding).predict(inputs)


def test_silu_is_off_by_a_thousandth_near_zero(outputs: Outputs):
    error = np.abs(outputs("engine")["silu"] - outputs("f32")["silu"])[0]
    assert 5e-4 < error[:160].max() < 1.3e-3
    assert (error[-80:] < 5e-3).all(), "float16's own rounding of numbers up to 12"


def test_subnormal_numbers_become_zero(outputs: Outputs):
    assert (outputs("f16")["tiny"] != 0).any()
    assert (outputs("engine")["tiny"] == 0).all()


@pytest.mark.parametrize("name", ["sum", "product"])
def test_sums_are_in_float16(outputs: Outputs, name: str):
    exact, half = (float(outputs(rounding)[name][0, 0]) for rounding in ("f16", "engine"))
    assert half != exact
    assert half == pytest.approx(exact, rel=0.05)
