"""Evaluation of recorded compute plans, and their recording.

`residency_plans.json` was written by hand in the form of `--record`. Its plans of a model of one
layer resemble real ones: operations on the Neural Engine, and no device for constants and states.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidRequest, ModelError
from paceline.storage.files import read_json, write_json
from paceline_coreml import compute_plan, residency
from paceline_coreml.compute_plan import ComputePlan, PlannedOp
from paceline_coreml.residency import Counts, OffEngine, evaluate, report
from support.coreml import written_artifact

RECORDED = Path(__file__).with_name("residency_plans.json")
LAYERS, HEAD = "layers-000-001.mlpackage", "head-000000-000160.mlpackage"

Value = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artifact whose packages hold a few bytes each: nothing looks into them."""
    return artifact(tmp_path / "artifact")


def artifact(folder: Path, **changes: Any) -> Path:
    """An artifact of one layer, which has the fingerprint of the recording."""
    shards = {
        "layer_shards": [{"path": LAYERS, "start": 0, "end": 1}],
        "head_shards": [{"path": HEAD, "start": 0, "end": 160}],
    }
    written_artifact(folder, layers=1, **shards, **changes)
    value = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", {**value, "fingerprint": "made-by-hand"})
    return folder


def changed(path: Path, change: Callable[[Value], object]) -> Path:
    """The recording with something else in it."""
    value = json.loads(RECORDED.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def plan_of(value: Value, package: str, rows: int) -> Value:
    (found,) = (one for one in value["plans"] if (one["package"], one["rows"]) == (package, rows))
    return found


def op_of(value: Value, package: str, rows: int, name: str) -> Value:
    (found,) = (op for op in plan_of(value, package, rows)["ops"] if op["name"] == name)
    return found


def op(kind: str, preferred: str | None = "neural-engine", cost: float | None = None) -> PlannedOp:
    return PlannedOp(f"a-{kind}", kind, preferred, ("neural-engine", "cpu"), cost)


def plan(*ops: PlannedOp) -> ComputePlan:
    return ComputePlan(LAYERS, 1, None, ops)


def test_a_recorded_plan_is_evaluated_without_a_mac(folder: Path):
    found = report(folder, recorded=RECORDED)
    assert found.passed
    assert found.value["passed"]
    assert (found.value["units"], found.value["rows"]) == ("cpu-and-ne", [1, 4])
    layers, _, head, _ = found.value["plans"]
    assert layers["convs"] == {"on": 5, "off": 0, "unknown": 0}
    assert layers["others"] == {"on": 5, "off": 0, "unknown": 2}
    assert [(one["type"], one["device"], one["able"]) for one in layers["elsewhere"]] == [
        ("read_state", "unknown", 0),
        ("write_state", "unknown", 0),
    ]
    assert head["elsewhere"] == []
    assert "operations of tiny all stay on the Neural Engine" in found.text
    assert "no device for 4 operations" in found.text
    assert json.loads(json.dumps(found.value)) == found.value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda value: op_of(value, LAYERS, 4, "q").update(preferred="cpu"),
            f"{LAYERS} at T = 4: 1 of 5 convolutions leave the Neural Engine",
        ),
        (
            lambda value: op_of(value, LAYERS, 4, "scores").update(preferred="gpu"),
            f"{LAYERS} at T = 4: 1 of 7 other operations leave the Neural Engine",
        ),
        (
            lambda value: op_of(value, HEAD, 1, "logits").update(preferred=None, supported=None),
            f"{HEAD} at T = 1: the plan has no device for 1 of 1 convolutions",
        ),
        (
            lambda value: plan_of(value, HEAD, 4)["ops"].pop(),
            f"{HEAD} at T = 4: the plan has no convolutions",
        ),
        (
            lambda value: plan_of(value, LAYERS, 1).update(ops=[], fault="ended by signal 9"),
            f"{LAYERS} at T = 1: Core ML made no plan: ended by signal 9",
        ),
        (
            lambda value: value["plans"].remove(plan_of(value, LAYERS, 4)),
            f"{LAYERS} at T = 4: Core ML made no plan: it is not in the recording",
        ),
    ],
    ids=["on the CPU", "another on the GPU", "unknown", "no convolutions", "no plan", "not asked"],
)
def test_operations_off_the_engine_are_named(
    folder: Path, tmp_path: Path, change: Callable[[Value], object], message: str
):
    found = report(folder, recorded=changed(tmp_path / "plans.json", change))
    assert not found.passed
    assert found.text.splitlines()[0] == message
    assert "operations of tiny do NOT all stay" in found.text
    assert [one["passed"] for one in found.value["plans"]].count(False) == 1


def test_supported_is_not_enough():
    verdict = evaluate(plan(op("conv"), op("conv", "cpu", 0.5), op("conv", "cpu", 0.25)))
    assert verdict.convs == Counts(on=1, off=2, unknown=0)
    assert verdict.elsewhere == (OffEngine("conv", "cpu", ops=2, able=2, cost=0.75),)
    assert verdict.fault


def test_constants_have_no_device():
    constants = [op("const", None), op("constexpr_blockwise_shift_scale", "cpu")]
    verdict = evaluate(plan(op("conv"), *constants))
    assert (verdict.others, verdict.elsewhere) == (Counts(0, 0, 0), ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.update(kind="plans"), "is a plans of version 1; expected coreml-plan"),
        (lambda value: value.update(version=2), "version 2"),
        (lambda value: value.pop("system"), r"plans\.json: system"),
        (lambda value: value.update(plans={"a": 1}), r"plans\.json: plans"),
        (lambda value: op_of(value, HEAD, 1, "logits").pop("cost"), r"plans\.json: .*\.cost"),
        (lambda value: value.update(fingerprint="other"), "plans of another artifact.*again"),
    ],
)
def test_an_invalid_recording_is_rejected(
    folder: Path, tmp_path: Path, change: Callable[[Value], object], message: str
):
    with pytest.raises(ModelError, match=message):
        report(folder, recorded=changed(tmp_path / "plans.json", change))


def test_without_a_mac_and_a_recording_the_error_names_the_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(residency, "on_a_mac", lambda: False)
    with pytest.raises(InvalidRequest, match=r"on a Mac.*--record FILE.*--recorded FILE"):
        report(folder)


DRAFTER = {"task": "draft", "drafts": {"taps": [0], "mask_token": 9, "target_layers": 2}}


@pytest.mark.parametrize("changes", [{}, {"functions": [1, 4]}, {"functions": [1, 4], **DRAFTER}])
def test_a_recording_gives_the_same_report_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Value
):
    folder = artifact(tmp_path / "artifact", **changes)
    asked = []

    def planned(
        folder: Path, package: str, rows: int, *, function: str | None, units: str
    ) -> ComputePlan:
        asked.append((package, rows, function, units))
        if (package, rows) == (HEAD, 4):
            return ComputePlan(package, rows, function, fault="ended by signal 9")
        return replace(plan(op("conv"), op("add", "cpu", 0.5)), package=package, rows=rows)

    monkeypatch.setattr(residency, "on_a_mac", lambda: True)
    monkeypatch.setattr(compute_plan, "record", planned)
    here = report(folder, units="all", record=tmp_path / "plans.json")
    assert asked == [
        (package, rows, f"t{rows}" if changes else None, "all")
        for package in (LAYERS, HEAD)
        for rows in (1, 4)
    ]
    assert not here.passed
    there = report(folder, recorded=tmp_path / "plans.json")
    assert (there.value, there.text, there.tables) == (here.value, here.text, here.tables)
