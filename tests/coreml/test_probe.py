"""`coreml probe`, and `convert --gate`: each check can fail, and stops what comes after it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.cli.app import main
from paceline.errors import InvalidRequest
from paceline.models import QUIET
from paceline.storage.report import Report
from paceline_coreml import compute_plan, probe
from paceline_coreml.compute_plan import ComputePlan, PlannedOp
from paceline_coreml.conversion.convert import open_model
from paceline_coreml.conversion.layers import Attention
from paceline_coreml.conversion.source import Source
from paceline_coreml.options import ConversionOptions
from paceline_coreml.probe import ProbeOptions, parse_shape, probe_layer, probe_shape, run_gates
from support.coreml import tiny_source
from support.coreml_checkpoints import tiny_checkpoint
from support.coreml_families import TinyModel
from support.fake_mac import LOAD, REASON, FakeMac, mac

__all__ = ["mac"]

pytestmark = pytest.mark.coreml

SHAPE = "d=32,heads=2,kv=1,dh=32,ff=48,T=4,S=32"
OPTIONS = ProbeOptions(QUIET)
RECIPE = ConversionOptions()
ROWS_PASSED = {"rules": True, "residency": None, "rows": True}
PASSED = {**ROWS_PASSED, "graph": True, "format": True, "weights": None}


def results(report: Report) -> dict[str, bool | None]:
    return {check["name"]: check["passed"] for check in report.value["checks"]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return tiny_source(tmp_path_factory.mktemp("source"))


def planned(device: str) -> Callable[..., ComputePlan]:
    """Core ML's plan of any package: one convolution, on a device."""

    def record(_folder: Path, package: str, rows: int, **_: Any) -> ComputePlan:
        op = PlannedOp("q", "conv", device, (device,), 1.0)
        return ComputePlan(package, rows, None, (op,))

    return record


@pytest.mark.parametrize(
    ("shape", "stateless"),
    [(SHAPE, []), (SHAPE, ["--stateless"]), (SHAPE.replace("T=4", "T=16"), ["--stateless"])],
)
def test_a_layer_with_random_weights_is_emulated(
    shape: str, stateless: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["coreml", "probe", "--shape", shape, "--json", "--quiet", *stateless]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["stateless"] == bool(stateless)
    assert value["shape"] == asdict(parse_shape(shape))
    assert value["units"] == "rehearsed"
    assert value["milliseconds"] > 0
    assert {check["name"]: check["passed"] for check in value["checks"]} == PASSED


@pytest.mark.parametrize("layer", [0, 2])
def test_a_model_layer_is_compared_with_transformers(source: Source, layer: int):
    model = open_model(source, ConversionOptions(slots=64))
    probed = probe_layer(source, model, layer, 4, OPTIONS)
    assert results(probed) == PASSED
    assert (probed.value["layer"], probed.value["rows"]) == (layer, 4)


@pytest.mark.parametrize("routing", ["top-1", "soft"])
def test_a_layer_with_convolution_states_and_experts_is_probed(tmp_path: Path, routing: Any):
    source = tiny_source(tmp_path, tiny_checkpoint(tmp_path / "zaya", "zaya"))
    options = ConversionOptions(slots=64, weights="f16", routing=routing)
    probed = probe_layer(source, open_model(source, options), 1, 4, OPTIONS)
    assert results(probed) == PASSED


def test_a_layer_off_the_neural_engine_or_failing_in_core_ml_fails_its_check(
    mac: FakeMac, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compute_plan, "record", planned("cpu"))
    probed = probe_shape(parse_shape(SHAPE), RECIPE, OPTIONS)
    assert results(probed) == {"rules": True, "residency": False}
    assert not probed.passed
    assert mac.calls == []
    monkeypatch.setattr(compute_plan, "record", planned("neural-engine"))
    mac.fails = lambda _: mac.calls[-1] == LOAD
    probed = probe_shape(parse_shape(SHAPE), RECIPE, OPTIONS)
    assert results(probed) == {"rules": True, "residency": True, "runs": False}
    assert REASON.rstrip(".") in probed.text


def test_rows_that_depend_on_their_forward_pass_are_not_exact(monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: Any, rows: int | None = None) -> dict[str, Any]:
        outputs = run_package(*arguments, rows=rows)
        return {name: out + np.float32(1e-3 * (rows == 1)) for name, out in outputs.items()}

    run_package = probe.run_package
    monkeypatch.setattr(probe, "run_package", run)
    assert results(probe_shape(parse_shape(SHAPE), RECIPE, OPTIONS))["rows"] is False


def test_swapped_heads_differ_from_the_reference(source: Source, monkeypatch: pytest.MonkeyPatch):
    def swapped(self: Attention, q: Any, *rest: Any) -> Any:
        return forward(self, torch.cat([q[:, 1:], q[:, :1]], 1), *rest)

    forward = Attention.forward
    monkeypatch.setattr(Attention, "forward", swapped)
    probed = probe_layer(source, open_model(source, ConversionOptions(slots=64)), 0, 4, OPTIONS)
    assert results(probed) == {**ROWS_PASSED, "graph": False}


MODEL = "a tiny model"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--shape", "d=32,heads=2,kv=1,dh=32,ff=48,T=64,S=32"), "T is 64"),
        (("--shape", "d=32,heads=5"), "d is 32"),
        (("--shape", "d=32,heads=4,kv=3"), "kv is 3"),
        (("--shape", "d=32,heads=2,ff=0"), "ff is 0"),
        (("--shape", "d=32,heads=2,layers=3"), "'layers=3'"),
        (("--shape", "heads=2"), "without d"),
        (("--shape", "d=3000000,heads=24,dh=128"), "of memory"),
        ((MODEL, "--layer", "2"), "layer 2"),
        ((MODEL, "--slots", "4000"), "slots is 4000"),
        ((MODEL, "--shape", SHAPE), "one of the two"),
    ],
)
def test_a_shape_or_layer_that_cannot_be_probed_is_a_one_line_error(
    tiny_gguf: Path, arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
):
    words = [word.replace(MODEL, str(tiny_gguf)) for word in arguments]
    assert main(["coreml", "probe", "--quiet", *words]) == 2
    assert named in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_classifier_is_rejected_before_probing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "probe_shape", lambda *_: pytest.fail("probed"))
    source = tiny_source(tmp_path, TinyModel("privacy filter", tmp_path / "checkpoint").folder)
    with pytest.raises(InvalidRequest):
        run_gates(source, ConversionOptions(), OPTIONS)


@pytest.mark.parametrize("failing", [None, 0, 3])
def test_gates_probe_a_shape_and_each_layer_kind_until_one_fails(
    failing: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    probed: list[Any] = []

    def stub(probe: Any) -> Report:
        probed.append(probe)
        return Report({}, passed=len(probed) - 1 != failing)

    monkeypatch.setattr(probe, "probe_shape", lambda shape, *_: stub(shape.T))
    monkeypatch.setattr(probe, "probe_layer", lambda _, __, layer, rows, ___: stub((layer, rows)))
    checkpoint = TinyModel("lfm2", tmp_path / "checkpoint").folder
    source = tiny_source(tmp_path, checkpoint)
    reports = run_gates(source, ConversionOptions(slots=64, functions=(2, 4)), OPTIONS)
    # Of its layers the first three are convolution, convolution, attention.
    every = [2, 4, (0, 2), (0, 4), (2, 2), (2, 4)]
    count = len(every) if failing is None else failing + 1
    assert (probed, len(reports)) == (every[:count], count)


def test_convert_stops_at_a_failing_gate(
    tiny_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fails(*_: Any) -> Iterator[probe.Check]:
        yield probe.Check("residency", False, "1 of 7 convolutions leave the Neural Engine")

    monkeypatch.setattr(probe, "_checks", fails)
    out = tmp_path / "out"
    command = ["convert", str(tiny_gguf), "--to", "coreml", "--gate", "--slots", "64", "--quiet"]
    assert main([*command, "--output", str(out)]) == 1
    lines = capsys.readouterr().out.strip().splitlines()
    assert "residency: FAILS: 1 of 7 convolutions leave the Neural Engine" in lines
    assert lines[-1] == "nothing was converted"
    assert not out.exists()
