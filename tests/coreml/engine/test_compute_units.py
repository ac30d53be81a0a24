"""Compute units: from the command line to coremltools, on a Mac that is none."""

import enum
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest

import paceline
from paceline.cli.app import main
from paceline.cli.options import ComputeUnits
from paceline.engines import ENGINES, EngineSettings, open_engine
from paceline.engines.base import COMPUTE_UNITS
from paceline.errors import InvalidRequest
from paceline_coreml.engine.packages import DEFAULT_UNITS, UNITS, open_package
from paceline_coreml.rehearsal.model import RehearsalModel

NAMES = {
    "all": "ALL",
    "cpu-only": "CPU_ONLY",
    "cpu-and-gpu": "CPU_AND_GPU",
    "cpu-and-ne": "CPU_AND_NE",
}


class ComputeUnit(enum.Enum):
    """As coremltools has it."""

    ALL = 1
    CPU_AND_GPU = 2
    CPU_ONLY = 3
    CPU_AND_NE = 4


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[ComputeUnit]:
    """The compute units that each package is loaded with, by a coremltools that rehearses."""
    found: list[ComputeUnit] = []

    def model(path: str, *, function_name: str | None, compute_units: ComputeUnit) -> Any:
        found.append(compute_units)
        return RehearsalModel(Path(path), function_name=function_name, rounding="f16")

    fake: Any = ModuleType("coremltools")
    fake.ComputeUnit, fake.models = ComputeUnit, SimpleNamespace(MLModel=model)
    monkeypatch.setitem(sys.modules, "coremltools", fake)
    for module in ("engine", "packages"):
        monkeypatch.setattr(f"paceline_coreml.engine.{module}.on_a_mac", lambda: True)
    return found


def test_every_place_has_the_same_names():
    assert {*COMPUTE_UNITS} == {*get_args(ComputeUnits)} == {*UNITS} == {*NAMES}
    assert UNITS == NAMES
    assert DEFAULT_UNITS in COMPUTE_UNITS


@pytest.mark.coreml
@pytest.mark.parametrize("units", [None, *NAMES])
def test_packages_are_loaded_for_the_compute_units_that_were_asked_for(
    units: str | None, tiny_core_ml: Path, loaded: list[ComputeUnit]
):
    engine = open_engine("coreml", tiny_core_ml, 192, EngineSettings(compute_units=units))
    assert {each.name for each in loaded} == {NAMES[units or "cpu-and-ne"]}
    assert engine.describe()["units"] == (units or "cpu-and-ne")


@pytest.mark.coreml
def test_off_a_mac_compute_units_change_nothing(tiny_core_ml: Path):
    engines = [
        open_engine("coreml", tiny_core_ml, 192, EngineSettings(compute_units=units))
        for units in (None, "all")
    ]
    assert engines[0].describe() == engines[1].describe()
    assert engines[0].describe()["units"] == "rehearsed"


def test_coremltools_gets_the_compute_units_by_name(
    loaded: list[ComputeUnit], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(sys.modules[__name__], "RehearsalModel", lambda *_, **__: object())
    for units, name in NAMES.items():
        open_package(tmp_path, function=None, units=units, rounding="f16")
        assert loaded[-1].name == name


@pytest.mark.parametrize("units", ["", "npu", "CPU_ONLY", "cpu", 3])
def test_other_compute_units_are_refused(units: Any):
    with pytest.raises(InvalidRequest, match="compute_units"):
        EngineSettings(compute_units=units)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "coreml"])
def test_an_engine_without_compute_units_refuses_them(engine: str, tmp_path: Path):
    with pytest.raises(InvalidRequest, match=r"coreml"):
        open_engine(engine, tmp_path, 64, EngineSettings(compute_units="all"))
    with pytest.raises(InvalidRequest, match=r"coreml"):
        paceline.load("no-such-model", engine=engine, compute_units="all")


def test_a_model_for_another_engine_refuses_compute_units(tiny_gguf: Path, cache: Path):
    with pytest.raises(InvalidRequest, match=r"coreml"):
        paceline.load(tiny_gguf, compute_units="cpu-only")


@pytest.mark.parametrize(
    "command",
    ["generate x", "chat", "serve", "plan", "verify", "bench run", "bench sweep", "bench peers"],
)
def test_commands_hand_compute_units_to_the_model(command: str, monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}

    def load(_: str, **options: Any) -> Any:
        given.update(options)
        raise InvalidRequest("enough")

    monkeypatch.setattr("paceline.runtime.load.load", load)
    words = [*command.split(), "--engine", "coreml", "--compute-units", "cpu-only"]
    assert main(words) == 2
    assert (given["engine"], given["compute_units"]) == ("coreml", "cpu-only")
