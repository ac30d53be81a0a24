"""Where Core ML would run an artifact: recorded plans judged, and how they are recorded.

`residency_plans.json` was made by hand, in the form that `--record` writes. It says of a model of
one layer what plans of such shards have been seen to say: convolutions on the Neural Engine, some
other operations not, and nothing of constants and states.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.errors import InvalidRequest, ModelError
from paceline.models.processes import Finished
from paceline.storage.files import sha256_of
from paceline.tools.coreml import compute_plan, residency
from paceline.tools.coreml.compute_plan import (
    Plan,
    PlannedOp,
    copy_with_default,
    ops_of,
    record,
)
from paceline.tools.coreml.residency import Counts, OffEngine, evaluate, report

RECORDED = Path(__file__).with_name("residency_plans.json")
LAYERS, HEAD = "layers-000-001.mlpackage", "head-000000-000160.mlpackage"

Value = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artifact whose packages hold a few bytes each: nothing looks into them."""
    return artifact(tmp_path / "artifact")


def artifact(folder: Path, **changes: Any) -> Path:
    for name in (LAYERS, HEAD):
        (folder / name).mkdir(parents=True)
        (folder / name / "Manifest.json").write_text("{}")
    np.save(folder / "embeddings.npy", np.zeros((160, 8), np.float16))
    np.save(folder / "rotary.npy", np.zeros((2, 64, 4), np.float32))
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
        }
        for path in folder.rglob("*")
        if path.is_file()
    }
    value = {
        **{"kind": "coreml-model", "version": 1, "name": "tiny", "family": "llama"},
        **{"task": "causal-lm", "labels": [], "reach": 0, "layers": 1, "hidden_size": 8},
        **{"stream_size": 8, "vocab_size": 160, "slots": 64, "rows": 4, "functions": []},
        **{"ring": 0, "lags": 0, "fingerprint": "made-by-hand", "files": files},
        "layer_shards": [{"path": LAYERS, "start": 0, "end": 1}],
        "head_shards": [{"path": HEAD, "start": 0, "end": 160}],
        **changes,
    }
    (folder / "manifest.json").write_text(json.dumps(value))
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


def plan(*ops: PlannedOp) -> Plan:
    return Plan(LAYERS, 1, None, ops)


def test_a_recorded_plan_is_judged_without_a_mac(folder: Path):
    found = report(folder, recorded=RECORDED)
    assert found.passed
    assert found.value["passed"]
    assert (found.value["units"], found.value["rows"]) == ("cpu-and-ne", [1, 4])
    layers, _, head, _ = found.value["plans"]
    assert layers["convs"] == {"on": 5, "off": 0, "unknown": 0}
    assert layers["others"] == {"on": 3, "off": 2, "unknown": 2}
    assert [(one["type"], one["device"], one["able"]) for one in layers["elsewhere"]] == [
        ("transpose", "cpu", 1),
        ("gather", "cpu", 0),
        ("read_state", "unknown", 0),
        ("write_state", "unknown", 0),
    ]
    assert head["elsewhere"] == []
    assert "convolutions of tiny all stay on the Neural Engine" in found.text
    assert "8 other operations do not or may not" in found.text
    assert json.loads(json.dumps(found.value)) == found.value


def test_the_tables_have_a_line_for_every_package_and_number_of_rows(folder: Path):
    (_, head, rows), (_, _, off) = report(folder, recorded=RECORDED).tables
    assert head[:3] == ["package", "T", "convs on"]
    assert [row[:2] for row in rows] == [[LAYERS, "1"], [LAYERS, "4"], [HEAD, "1"], [HEAD, "4"]]
    assert {len(row) for row in rows} == {len(head)}
    assert off[0] == [LAYERS, "1", "transpose", "cpu", "1", "1", "4.0 %"]
    assert off[2][-1] == "", "the plan says nothing of a state's cost"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda value: op_of(value, LAYERS, 4, "q").update(preferred="cpu"),
            f"{LAYERS} at T = 4: 1 of 5 convolutions leave the Neural Engine",
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
    ids=["on the CPU", "unknown", "no convolutions", "no plan", "not asked"],
)
def test_what_does_not_stay_is_named(
    folder: Path, tmp_path: Path, change: Callable[[Value], object], message: str
):
    found = report(folder, recorded=changed(tmp_path / "plans.json", change))
    assert not found.passed
    assert found.text.splitlines()[0] == message
    assert "convolutions of tiny do NOT all stay" in found.text
    assert [one["passed"] for one in found.value["plans"]].count(False) == 1


def test_which_shapes_were_seen_is_said(folder: Path, tmp_path: Path):
    text = report(folder, recorded=RECORDED).text
    assert "T = 1 and T = 4, each as the default shape of a copy" in text
    assert "--functions 1,4" in text
    static = artifact(tmp_path / "static", functions=[1, 4])
    text = report(static, recorded=RECORDED).text
    assert "T = 1 and T = 4, each in a function of its own\n" in text
    four = artifact(tmp_path / "four", functions=[4])
    assert "T = 1 has no function and no plan" in report(four, recorded=RECORDED).text


def test_what_could_run_on_the_neural_engine_does_not_count_as_there():
    verdict = evaluate(plan(op("conv"), op("conv", "cpu", 0.5), op("conv", "cpu", 0.25)))
    assert verdict.convs == Counts(on=1, off=2, unknown=0)
    assert verdict.elsewhere == (OffEngine("conv", "cpu", ops=2, able=2, cost=0.75),)
    assert verdict.fault


def test_operations_that_are_no_convolutions_are_listed_and_do_not_fail():
    verdict = evaluate(plan(op("conv"), op("add", "gpu"), op("softmax", None), op("mul")))
    assert verdict.fault is None
    assert verdict.others == Counts(on=1, off=1, unknown=1)
    assert [(one.type, one.device) for one in verdict.elsewhere] == [
        ("add", "gpu"),
        ("softmax", "unknown"),
    ]


def test_constants_are_on_no_device():
    constants = [op("const", None), op("constexpr_blockwise_shift_scale", "cpu")]
    verdict = evaluate(plan(op("conv"), *constants))
    assert (verdict.others, verdict.elsewhere) == (Counts(0, 0, 0), ())


def test_convolutions_come_first_then_what_costs_most():
    found = evaluate(plan(op("add", "cpu", 0.1), op("mul", "cpu", 0.6), op("conv", "cpu", 0.0)))
    assert [one.type for one in found.elsewhere] == ["conv", "mul", "add"]


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
def test_a_recording_that_cannot_be_used_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[Value], object], message: str
):
    with pytest.raises(ModelError, match=message):
        report(folder, recorded=changed(tmp_path / "plans.json", change))


def test_without_a_mac_and_a_recording_it_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(residency, "on_a_mac", lambda: False)
    with pytest.raises(InvalidRequest, match=r"on a Mac.*--record FILE.*--recorded FILE"):
        report(folder)


def test_units_and_files_are_checked_first(folder: Path, tmp_path: Path):
    with pytest.raises(InvalidRequest, match="compute units are 'npu'; expected one of cpu-and-ne"):
        report(folder, units="npu", recorded=RECORDED)
    with pytest.raises(InvalidRequest, match="either recorded or evaluated"):
        report(folder, recorded=RECORDED, record=tmp_path / "plans.json")


@pytest.mark.parametrize("functions", [[], [1, 4]])
def test_what_is_recorded_is_judged_the_same_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, functions: list[int]
):
    folder = artifact(tmp_path / "artifact", functions=functions)
    asked = []

    def planned(folder: Path, package: str, rows: int, *, function: str | None, units: str) -> Plan:
        asked.append((package, rows, function, units))
        if (package, rows) == (HEAD, 4):
            return Plan(package, rows, function, fault="ended by signal 9")
        return replace(plan(op("conv"), op("add", "cpu", 0.5)), package=package, rows=rows)

    monkeypatch.setattr(residency, "on_a_mac", lambda: True)
    monkeypatch.setattr(compute_plan, "record", planned)
    here = report(folder, units="all", record=tmp_path / "plans.json")
    assert asked == [
        (package, rows, f"t{rows}" if functions else None, "all")
        for package in (LAYERS, HEAD)
        for rows in (1, 4)
    ]
    assert not here.passed
    there = report(folder, recorded=tmp_path / "plans.json")
    assert (there.value, there.text, there.tables) == (here.value, here.text, here.tables)


def test_a_recording_that_cannot_be_written_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(residency, "on_a_mac", lambda: True)
    monkeypatch.setattr(compute_plan, "record", lambda *_, **__: plan(op("conv")))
    with pytest.raises(InvalidRequest, match="cannot write"):
        report(folder, record=tmp_path / "none" / "plans.json")


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("print('plan'); raise RuntimeError('not today')", "RuntimeError: not today"),
        ("", "it gave no reason"),
    ],
    ids=["killed", "failed", "no file"],
)
def test_a_child_that_fails_is_a_plan_with_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, fault: str
):
    python = compute_plan.python
    monkeypatch.setattr(compute_plan, "python", lambda *_: python("-c", program))
    found = record(tmp_path, LAYERS, 4, function="t4", units="cpu-and-ne")
    assert found == Plan(LAYERS, 4, "t4", fault=fault)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer, with coremltools."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("coremltools")
    from paceline.tools.coreml.families import open_family
    from paceline.tools.coreml.shards import Sizes, convert_layers
    from support.coreml import tiny_llama

    folder = tmp_path_factory.mktemp("package")
    family = open_family(
        tiny_llama(folder / "checkpoint", num_hidden_layers=1), slots=64, conv_slots=64
    )
    convert_layers(family, 0, 1, sizes=Sizes(4, 64, 64)).save(str(folder / LAYERS))
    return folder / LAYERS


@pytest.mark.coreml
def test_the_default_shape_of_a_copy_is_that_of_the_rows(package: Path, tmp_path: Path):
    from paceline.engines.coreml.rehearsal.program import read_package

    before = {path: sha256_of(path) for path in package.rglob("*") if path.is_file()}
    for rows in (1, 3, 4):
        found = read_package(copy_with_default(package, tmp_path / f"{rows}.mlpackage", rows, None))
        shapes = {one.name: one.shape for one in found.function().inputs}
        assert shapes["hidden"] == (1, 64, rows, 1)
        assert shapes["attn_mask"] == (1, 1, rows, 64)
        assert shapes["kv_write_mask"] == (1, 1, 64, rows)
    assert {path: sha256_of(path) for path in before} == before, "the package was written to"


@pytest.mark.coreml
def test_rows_that_a_package_does_not_take_are_refused(package: Path, tmp_path: Path):
    with pytest.raises(ModelError, match="takes 1 to 4 rows, not 5"):
        copy_with_default(package, tmp_path / "copy", 5, None)


@pytest.mark.coreml
def test_the_default_function_of_a_copy_is_the_one_for_the_rows(package: Path, tmp_path: Path):
    from paceline.engines.coreml.rehearsal.program import read_package
    from paceline.tools.coreml.shards import static_functions

    each = {one.name: one.shape for one in read_package(package).function().inputs}
    four = {"hidden": (1, 64, 4, 1), "attn_mask": (1, 1, 4, 64), "kv_write_mask": (1, 1, 64, 4)}
    four |= {"rope_cos": (4, 8), "rope_sin": (4, 8)}
    static = tmp_path / "static.mlpackage"
    static_functions(package, {1: each, 4: four}, static)
    found = read_package(copy_with_default(static, tmp_path / "copy.mlpackage", 4, "t4"))
    assert found.default_function == "t4"
    assert {one.name: one.shape for one in found.function().inputs} == four
    with pytest.raises(ModelError, match="has no function 't3'"):
        copy_with_default(static, tmp_path / "other.mlpackage", 3, "t3")


@pytest.mark.coreml
@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML is here")
def test_without_core_ml_the_child_says_so(package: Path):
    found = record(package.parent, LAYERS, 4, function=None, units="cpu-and-ne")
    assert found.fault is not None
    assert "macOS" in found.fault


@pytest.mark.coreml
def test_the_child_plans_the_copy_and_its_parent_reads_what_it_wrote(
    package: Path, monkeypatch: pytest.MonkeyPatch
):
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    from paceline.engines.coreml.rehearsal.program import read_package

    seen: dict[str, Any] = {}

    def compiled(model: str, destination_path: str) -> str:
        (hidden,) = (i for i in read_package(Path(model)).function().inputs if i.name == "hidden")
        seen["shape"] = hidden.shape
        return destination_path

    def loaded(path: str, compute_units: Any) -> Any:
        seen["asked"] = (Path(path).suffix, compute_units)
        return planned("main")

    def run(argv: Sequence[str]) -> Finished:
        compute_plan._main(argv[argv.index("paceline.tools.coreml.compute_plan") + 1 :])
        return Finished(0, ())

    monkeypatch.setattr(ct.models.utils, "compile_model", compiled)
    monkeypatch.setattr(MLComputePlan, "load_from_path", loaded)
    monkeypatch.setattr(compute_plan, "run_child", run)
    found = record(package.parent, LAYERS, 3, function=None, units="all")
    assert seen == {"shape": (1, 64, 3, 1), "asked": (".mlmodelc", ct.ComputeUnit.ALL)}
    assert found == Plan(LAYERS, 3, None, tuple(ops_of(planned("main"), "main")))


@pytest.mark.coreml
def test_a_plan_of_coremltools_is_read():
    assert list(ops_of(planned("t4"), "t4")) == [
        PlannedOp("w", "const", None, None, None),
        PlannedOp("y", "conv", "neural-engine", ("neural-engine", "gpu", "cpu"), 0.75),
        PlannedOp("", "cond", None, None, None),
        PlannedOp("z", "add", "cpu", ("cpu",), 0.25),
    ]


@pytest.mark.coreml
def test_a_plan_of_something_else_is_refused():
    found = planned("t4")
    with pytest.raises(ModelError, match="no function 't1', only other, t4"):
        list(ops_of(found, "t1"))
    found.model_structure = replace(found.model_structure, program=None)
    with pytest.raises(ModelError, match="not of an ML program"):
        list(ops_of(found, "main"))


def planned(name: str) -> Any:
    """A plan of coremltools' own classes; only the plan itself, which asks Core ML, stands in.

    The function `name` has a constant, a convolution, and an addition in a nested block.
    """
    pytest.importorskip("coremltools")
    from coremltools.models import compute_device as devices
    from coremltools.models import compute_plan as plans

    # Their constructors want what only Core ML gives.
    engine, gpu, cpu = (
        object.__new__(kind)
        for kind in (
            devices.MLNeuralEngineComputeDevice,
            devices.MLGPUComputeDevice,
            devices.MLCPUComputeDevice,
        )
    )

    def operation(kind: str, outputs: list[str], blocks: list[Any] | None = None) -> Any:
        made = [
            plans.MLModelStructureProgramNamedValueType(
                name=name, type=plans.MLModelStructureProgramValueType()
            )
            for name in outputs
        ]
        return plans.MLModelStructureProgramOperation(
            inputs={}, operator_name=kind, outputs=made, blocks=blocks or [], __proxy__=None
        )

    def block(*operations: Any) -> Any:
        return plans.MLModelStructureProgramBlock(
            inputs=[], operations=list(operations), output_names=[]
        )

    def function(body: Any) -> Any:
        return plans.MLModelStructureProgramFunction(inputs=[], block=body)

    weight, conv, add = (
        operation("const", ["w"]),
        operation("ios18.conv", ["y"]),
        operation("ios18.add", ["z"]),
    )
    body = block(weight, conv, operation("cond", [], [block(add)]))
    program = plans.MLModelStructureProgram(
        functions={"other": function(block()), name: function(body)}
    )
    usages = {
        id(conv): plans.MLComputePlanDeviceUsage(engine, [engine, gpu, cpu]),
        id(add): plans.MLComputePlanDeviceUsage(cpu, [cpu]),
    }
    costs = {id(conv): plans.MLComputePlanCost(0.75), id(add): plans.MLComputePlanCost(0.25)}
    return SimpleNamespace(
        model_structure=plans.MLModelStructure(neuralnetwork=None, program=program, pipeline=None),
        get_compute_device_usage_for_mlprogram_operation=lambda op: usages.get(id(op)),
        get_estimated_cost_for_mlprogram_operation=lambda op: costs.get(id(op)),
    )
