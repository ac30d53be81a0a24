"""Core ML's compute plans: made in a child process, of a copy with another default."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.storage.files import sha256_of
from paceline.system.processes import Finished
from paceline_coreml import compute_plan
from paceline_coreml.compute_plan import ComputePlan, PlannedOp, copy_with_default, ops_of, record

LAYERS = "layers-000-001.mlpackage"


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("print('plan'); raise RuntimeError('not today')", "RuntimeError: not today"),
        ("", "it gave no reason"),
    ],
    ids=["killed", "failed", "no file"],
)
def test_a_crash_of_the_child_is_a_fault_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, fault: str
):
    python = compute_plan.python
    monkeypatch.setattr(compute_plan, "python", lambda *_: python("-c", program))
    found = record(tmp_path, LAYERS, 4, function="t4", units="cpu-and-ne")
    assert found == ComputePlan(LAYERS, 4, "t4", fault=fault)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted layer."""
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
def test_the_copys_default_shape_has_the_rows(package: Path, tmp_path: Path):
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
def test_the_copys_default_function_has_the_rows(package: Path, tmp_path: Path):
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
def test_the_parent_reads_the_plan_of_the_copy(package: Path, monkeypatch: pytest.MonkeyPatch):
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
def test_a_plan_of_coremltools_is_converted():
    assert list(ops_of(planned("t4"), "t4")) == [
        PlannedOp("w", "const", None, None, None),
        PlannedOp("y", "conv", "neural-engine", ("neural-engine", "gpu", "cpu"), 0.75),
        PlannedOp("", "cond", None, None, None),
        PlannedOp("z", "add", "cpu", ("cpu",), 0.25),
    ]


@pytest.mark.coreml
def test_another_kind_of_plan_is_rejected():
    found = planned("t4")
    with pytest.raises(ModelError, match="'t1'"):
        list(ops_of(found, "t1"))
    found.model_structure = replace(found.model_structure, program=None)
    with pytest.raises(ModelError, match="not of an ML program"):
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
