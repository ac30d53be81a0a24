"""Compute units: from the command line to coremltools, on a Mac that is none."""

from pathlib import Path
from typing import Any, get_args

import pytest

import paceline
from paceline.cli.app import main
from paceline.cli.options import ComputeUnits
from paceline.engines import ENGINES, EngineSettings, open_engine
from paceline.engines.base import COMPUTE_UNITS
from paceline.errors import InvalidRequest
from paceline_coreml.engine.packages import DEFAULT_UNITS, UNITS
from support.fake_mac import FakeMac, mac

__all__ = ["mac"]

NAMES = {
    "all": "ALL",
    "cpu-only": "CPU_ONLY",
    "cpu-and-gpu": "CPU_AND_GPU",
    "cpu-and-ne": "CPU_AND_NE",
}


def test_compute_unit_names_match_everywhere():
    assert {*COMPUTE_UNITS} == {*get_args(ComputeUnits)} == {*UNITS} == {*NAMES}
    assert UNITS == NAMES
    assert DEFAULT_UNITS in COMPUTE_UNITS


@pytest.mark.coreml
@pytest.mark.parametrize("units", [None, *NAMES])
def test_packages_are_loaded_for_the_requested_compute_units(
    units: str | None, artifact: Path, mac: FakeMac
):
    engine = open_engine("coreml", artifact, 192, EngineSettings(compute_units=units))
    assert {*mac.units} == {NAMES[units or "cpu-and-ne"]}
    assert engine.describe()["units"] == (units or "cpu-and-ne")


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "coreml"])
def test_unknown_and_unsupported_compute_units_are_rejected(engine: str, tmp_path: Path):
    for units in ("npu", 3):
        with pytest.raises(InvalidRequest, match="compute_units"):
            EngineSettings(compute_units=units)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"coreml"):
        open_engine(engine, tmp_path, 64, EngineSettings(compute_units="all"))
    with pytest.raises(InvalidRequest, match=r"coreml"):
        paceline.load("no-such-model", engine=engine, compute_units="all")


@pytest.mark.parametrize("command", ["generate x", "serve", "bench sweep"])
def test_commands_pass_compute_units_to_the_model(command: str, monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}

    def load(_: str, **options: Any) -> Any:
        given.update(options)
        raise InvalidRequest("enough")

    monkeypatch.setattr("paceline.runtime.load.load", load)
    words = [*command.split(), "--engine", "coreml", "--compute-units", "cpu-only"]
    assert main(words) == 2
    assert (given["engine"], given["compute_units"]) == ("coreml", "cpu-only")
