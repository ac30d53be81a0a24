"""Evaluation of recorded compute plans, and their recording.

`residency_plans.json` was written by hand in the form of `--record`. Its plans of a model of one
layer resemble real ones: operations on the Neural Engine, and no device for constants and states.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import InvalidRequest, ModelError
from paceline.storage.files import read_json, sha256_of, write_json
from paceline.system.processes import Finished
from paceline_coreml import compute_plan, residency
from paceline_coreml.compute_plan import ComputePlan, PlannedOp, copy_with_default, ops_of, record
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
def test_operations_off_the_neural_engine_are_named(
    folder: Path, tmp_path: Path, change: Callable[[Value], object], message: str
):
    found = report(folder, recorded=changed(tmp_path / "plans.json", change))
    assert not found.passed
    assert found.text.splitlines()[0] == message
    assert "operations of tiny do NOT all stay" in found.text
    assert [one["passed"] for one in found.value["plans"]].count(False) == 1


def test_supported_but_not_preferred_fails_and_constants_have_no_device():
    verdict = evaluate(plan(op("conv"), op("conv", "cpu", 0.5), op("conv", "cpu", 0.25)))
    assert verdict.convs == Counts(on=1, off=2, unknown=0)
    assert verdict.elsewhere == (OffEngine("conv", "cpu", ops=2, able=2, cost=0.75),)
    assert verdict.fault
    constants = [op("const", None), op("constexpr_blockwise_shift_scale", "cpu")]
    verdict = evaluate(plan(op("conv"), *constants))
    assert (verdict.others, verdict.elsewhere) == (Counts(0, 0, 0), ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.update(kind="plans"), r"plans\.json: kind"),
        (lambda value: value.update(version=2), r"plans\.json: version"),
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


def test_the_error_without_a_mac_or_recording_names_the_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(residency, "on_a_mac", lambda: False)
    with pytest.raises(InvalidRequest, match=r"on a Mac.*--record FILE.*--recorded FILE"):
        report(folder)


DRAFTER = {"task": "draft", "drafts": {"taps": [0], "mask_token": 9, "target_layers": 2}}


@pytest.mark.parametrize("changes", [{}, {"functions": [1, 4]}, {"functions": [1, 4], **DRAFTER}])
def test_a_recording_gives_the_same_report_on_another_machine(
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


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("print('plan'); raise RuntimeError('not today')", "RuntimeError: not today"),
        ("", "it gave no reason"),
    ],
    ids=["killed", "failed", "no file"],
)
def test_a_child_process_crash_is_a_compute_plan_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, fault: str
):
    python = compute_plan.python
    monkeypatch.setattr(compute_plan, "python", lambda *_: python("-c", program))
    found = record(tmp_path, LAYERS, 4, function="t4", units="cpu-and-ne")
    assert found == ComputePlan(LAYERS, 4, "t4", fault=fault)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("coremltools")
    from paceline_coreml.conversion.families import open_family
    from paceline_coreml.conversion.shards import ShardSizes, convert_layers
    from support.coreml import tiny_llama

    folder = tmp_path_factory.mktemp("package")
    family = open_family(
        tiny_llama(folder / "checkpoint", num_hidden_layers=1), slots=64, conv_slots=64
    )
    convert_layers(family, 0, 1, sizes=ShardSizes(4, 64, 64)).save(str(folder / LAYERS))
    return folder / LAYERS


@pytest.mark.coreml
def test_the_copy_has_a_default_shape_with_the_given_rows(package: Path, tmp_path: Path):
    from paceline_coreml.rehearsal.program import read_package

    before = {path: sha256_of(path) for path in package.rglob("*") if path.is_file()}
    for rows in (1, 3, 4):
        found = read_package(copy_with_default(package, tmp_path / f"{rows}.mlpackage", rows, None))
        shapes = {one.name: one.shape for one in found.function().inputs}
        assert shapes["hidden"] == (1, 64, rows, 1)
        assert shapes["attn_mask"] == (1, 1, rows, 64)
        assert shapes["kv_write_mask"] == (1, 1, 64, rows)
    assert {path: sha256_of(path) for path in before} == before, "the package was written to"
    with pytest.raises(ModelError, match="not 5"):
        copy_with_default(package, tmp_path / "copy", 5, None)


@pytest.mark.coreml
def test_the_copy_has_a_default_function_with_the_given_rows(package: Path, tmp_path: Path):
    from paceline_coreml.conversion.shards import static_functions
    from paceline_coreml.rehearsal.program import read_package

    each = {one.name: one.shape for one in read_package(package).function().inputs}
    four = {"hidden": (1, 64, 4, 1), "attn_mask": (1, 1, 4, 64), "kv_write_mask": (1, 1, 64, 4)}
    four |= {"rope_cos": (4, 8), "rope_sin": (4, 8)}
    static = tmp_path / "static.mlpackage"
    static_functions(package, {1: each, 4: four}, static)
    found = read_package(copy_with_default(static, tmp_path / "copy.mlpackage", 4, "t4"))
    assert found.default_function == "t4"
    assert {one.name: one.shape for one in found.function().inputs} == four
    with pytest.raises(ModelError, match="'t3'"):
        copy_with_default(static, tmp_path / "other.mlpackage", 3, "t3")


@pytest.mark.coreml
def test_the_parent_process_reads_the_copys_plan(package: Path, monkeypatch: pytest.MonkeyPatch):
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    from paceline_coreml.rehearsal.program import read_package

    seen: dict[str, Any] = {}

    def compiled(model: str, destination_path: str) -> str:
        (hidden,) = (i for i in read_package(Path(model)).function().inputs if i.name == "hidden")
        seen["shape"] = hidden.shape
        return destination_path

    def loaded(path: str, compute_units: Any) -> Any:
        seen["asked"] = (Path(path).suffix, compute_units)
        return planned("main")

    def run(argv: Sequence[str]) -> Finished:
        compute_plan._main(argv[argv.index("paceline_coreml.compute_plan") + 1 :])
        return Finished(0, ())

    monkeypatch.setattr(ct.models.utils, "compile_model", compiled)
    monkeypatch.setattr(MLComputePlan, "load_from_path", loaded)
    monkeypatch.setattr(compute_plan, "run_child", run)
    found = record(package.parent, LAYERS, 3, function=None, units="all")
    assert seen == {"shape": (1, 64, 3, 1), "asked": (".mlmodelc", ct.ComputeUnit.ALL)}
    assert found == ComputePlan(LAYERS, 3, None, tuple(ops_of(planned("main"), "main")))


@pytest.mark.coreml
def test_a_coremltools_compute_plan_is_converted():
    assert list(ops_of(planned("t4"), "t4")) == [
        PlannedOp("w", "const", None, None, None),
        PlannedOp("y", "conv", "neural-engine", ("neural-engine", "gpu", "cpu"), 0.75),
        PlannedOp("", "cond", None, None, None),
        PlannedOp("z", "add", "cpu", ("cpu",), 0.25),
    ]


@pytest.mark.coreml
def test_an_unsupported_compute_plan_is_rejected():
    found = planned("t4")
    with pytest.raises(ModelError, match="'t1'"):
        list(ops_of(found, "t1"))
    found.model_structure = replace(found.model_structure, program=None)
    with pytest.raises(ModelError, match="not for an ML program"):
        list(ops_of(found, "main"))


def planned(name: str) -> Any:
    """A plan of coremltools' own classes; only the plan itself, which needs Core ML, is a stub.

    The function `name` has a constant, a convolution, and an addition in a nested block.
    """
    pytest.importorskip("coremltools")
    from coremltools.models import compute_device as devices
    from coremltools.models import compute_plan as plans

    # Their constructors need objects of Core ML.
    kinds = ("MLNeuralEngineComputeDevice", "MLGPUComputeDevice", "MLCPUComputeDevice")
    engine, gpu, cpu = (object.__new__(getattr(devices, kind)) for kind in kinds)

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

    weight, conv = operation("const", ["w"]), operation("ios18.conv", ["y"])
    add = operation("ios18.add", ["z"])
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
