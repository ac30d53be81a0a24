from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("coremltools")

from rehearsal_cases import CASES, Case  # noqa: E402

from paceline_coreml.rehearsal import RehearsalModel  # noqa: E402
from paceline_coreml.rehearsal.ops import OPS  # noqa: E402

pytestmark = pytest.mark.coreml

STATE = np.random.default_rng(9).normal(size=(2, 4)).astype(np.float16).astype(np.float32)
"""What every state holds before a case runs."""


@pytest.fixture(scope="module")
def made(save_program: Callable[..., Path]) -> Mapping[Case, tuple[np.ndarray, ...]]:
    """What the rehearsal makes of all cases, which are one program: saving is slow."""
    inputs = {
        f"case{at}_{place}": numbers
        for at, case in enumerate(CASES)
        for place, numbers in enumerate(case.numbers())
    }
    states = {f"case{at}_state": case.state for at, case in enumerate(CASES) if case.state}
    outputs: list[list[str]] = []

    def build(mb: Any, *variables: Any) -> list[Any]:
        named = dict(zip([*inputs, *states], variables, strict=True))
        given = []
        for at, case in enumerate(CASES):
            made = case.build(mb, *(named[name] for name in named if name.startswith(f"case{at}_")))
            several = made if isinstance(made, list | tuple) else [made]
            outputs.append([one.name for one in several])
            given += several
        return given

    model = RehearsalModel(save_program(build, inputs, states=states), rounding="f32")
    built = {op.type for op in model.function.block.ops}
    assert {case.op for case in CASES} <= built, "coremltools replaced what a case is about"
    state = model.make_state()
    for name in states:
        state.cells[name].array = STATE
    found = model.predict(inputs, state)
    return {
        case: tuple(found[name] for name in names)
        for case, names in zip(CASES, outputs, strict=True)
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_operation_computes_what_torch_does(
    case: Case, made: Mapping[Case, tuple[np.ndarray, ...]]
):
    states = [torch.from_numpy(STATE)] if case.state else []
    expected = case.expected(*map(torch.from_numpy, case.numbers()), *states)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(made[case]) == len(expected)
    for one, other in zip(made[case], expected, strict=True):
        assert one.shape == tuple(other.shape)
        if one.dtype == np.float32:
            np.testing.assert_allclose(one, other.numpy(), rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(one, other.numpy())


def test_every_operation_has_a_case():
    assert {case.op for case in CASES} == set(OPS)
