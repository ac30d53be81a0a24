from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("coremltools")

import rehearsal_cases_places as places  # noqa: E402
import rehearsal_cases_stored as stored  # noqa: E402
import rehearsal_cases_sums as sums  # noqa: E402
from coremltools.converters.mil.mil import types  # noqa: E402
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry  # noqa: E402
from rehearsal_case import Case  # noqa: E402

from paceline_coreml.rehearsal import RehearsalModel  # noqa: E402
from paceline_coreml.rehearsal.ops import OPS  # noqa: E402

pytestmark = pytest.mark.coreml

CASES = [*places.CASES, *sums.CASES, *stored.CASES]

STATE = np.random.default_rng(9).normal(size=(2, 4)).astype(np.float16).astype(np.float32)
"""What every state holds before a case runs."""


def together(
    cases: Sequence[Case], target: str, save_program: Callable[..., Path]
) -> dict[Case, tuple[np.ndarray, ...]]:
    """What the rehearsal makes of all cases of a target, which are one program: saving is slow."""
    cases = [case for case in cases if case.target == target]
    inputs = {
        f"case{at}_{place}": numbers
        for at, case in enumerate(cases)
        for place, numbers in enumerate(case.numbers())
    }
    states = {f"case{at}_state": case.state for at, case in enumerate(cases) if case.state}
    outputs: list[list[str]] = []

    def build(mb: Any, *variables: Any) -> list[Any]:
        named = dict(zip([*inputs, *states], variables, strict=True))
        given = []
        for at, case in enumerate(cases):
            made = case.build(mb, *(named[name] for name in named if name.startswith(f"case{at}_")))
            several = made if isinstance(made, list | tuple) else [made]
            # A model gives out no bools and no short integers.
            several = [
                mb.cast(x=one, dtype="int32") if one.dtype in (types.bool, types.uint16) else one
                for one in several
            ]
            outputs.append([one.name for one in several])
            given += several
        return given

    model = RehearsalModel(
        save_program(build, inputs, target=target, states=states), rounding="f32"
    )
    built = {op.type for op in model.function.block.ops}
    assert {case.op for case in cases} <= built, "coremltools replaced what a case is about"
    state = model.make_state()
    for name in states:
        state.write_state(name, STATE)
    found = model.predict(inputs, state)
    return {
        case: tuple(found[name] for name in names)
        for case, names in zip(cases, outputs, strict=True)
    }


@pytest.fixture(scope="module")
def made(save_program: Callable[..., Path]) -> Mapping[Case, tuple[np.ndarray, ...]]:
    targets = sorted({case.target for case in CASES})
    return {
        case: found
        for target in targets
        for case, found in together(CASES, target, save_program).items()
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


def test_every_parameter_of_an_operation_is_known_in_every_version():
    # As coremltools defines them, from iOS 15 to iOS 18.
    unknown = {
        (name, version.name, parameter)
        for name, entry in OPS.items()
        for version, definition in SSAOpRegistry.core_ops.get(name, {}).items()
        for parameter in definition.input_spec.input_types
        if parameter not in entry.forms
    }
    defined = {name for name in OPS if SSAOpRegistry.core_ops.get(name)}
    assert unknown == set()
    assert set(OPS) - defined == {"write_state"}, "which coremltools writes, and has no class for"
