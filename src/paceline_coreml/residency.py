"""Evaluates whether an artifact would run on the Neural Engine, from Core ML's compute plans.

Plans are plain data, so plans recorded on a Mac can be evaluated anywhere. A shard passes if every
operation *prefers* the Neural Engine at every planned number of rows. *Supported* is not enough,
because Core ML may plan a supported operation elsewhere. A convolution without a device in the plan
fails. Other operations without one are listed, because reads and writes of states have none.

A plan is not a measurement: confirm it by timing.
"""

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import paceline
from paceline.errors import InvalidRequest, ModelError
from paceline.models import QUIET, Progress
from paceline.storage.files import read_json, write_json, writing
from paceline.storage.report import Report, Table
from paceline.storage.validation import validated
from paceline_coreml import compute_plan
from paceline_coreml.compute_plan import NEURAL_ENGINE, ComputePlan, PlannedOp
from paceline_coreml.engine.artifact import Artifact, read_artifact
from paceline_coreml.engine.packages import on_a_mac

UNKNOWN = "unknown"
"""Device of operations that have none in the plan."""


class Counts(NamedTuple):
    """The numbers of operations on the Neural Engine, off it, and without a device in the plan."""

    on: int
    off: int
    unknown: int


class OffEngine(NamedTuple):
    """The operations of one type that are planned off the Neural Engine."""

    type: str
    device: str
    """The device, or `UNKNOWN`."""
    ops: int
    able: int
    """Number of operations that the Neural Engine supports."""
    cost: float | None
    """Their share of the total cost, 0 to 1; None if it is not in the plan."""


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    convs: Counts
    others: Counts
    """Operations that run in a forward pass and are not convolutions."""
    elsewhere: tuple[OffEngine, ...]
    """Convolutions first, then by cost."""
    fault: str | None
    """The reason for a failure, or None if it passes."""


@dataclass(frozen=True, slots=True)
class RecordedPlans:
    """The plans of an artifact and their provenance: the file that `--record` writes."""

    kind: Literal["coreml-plans"]
    version: Literal[1]
    fingerprint: str
    """The artifact's fingerprint."""
    units: str
    system: str
    made_by: str
    plans: tuple[ComputePlan, ...]


def report(
    folder: Path,
    *,
    units: str = "cpu-and-ne",
    recorded: Path | None = None,
    record: Path | None = None,
    progress: Progress = QUIET,
) -> Report:
    """Evaluate the plans of all packages of an artifact for `units`, one of `packages.UNITS`.

    The plans are in the file `recorded`. If it is None, Core ML makes them, and they are written to
    the file `record`, if any.

    Raises:
        ModelError: the artifact is incomplete, or the file is not a recording of its plans.
        InvalidRequest: this is not a Mac and `recorded` is None, or the file cannot be written.
    """
    if recorded is not None and record is not None:
        raise InvalidRequest("--record cannot be used with --recorded; remove one of the two")
    artifact = read_artifact(folder)
    if recorded is not None:
        recording = _read(recorded, artifact)
    elif on_a_mac():
        recording = _record(artifact, units, progress)
    else:
        raise InvalidRequest(
            f"plans are available only on a Mac: run `paceline coreml residency {folder} "
            "--record FILE` there, and evaluate them on this machine with --recorded FILE"
        )
    if record is not None:
        with writing(record):
            write_json(record, asdict(recording))
    return _report(artifact, recording)


def evaluate(plan: ComputePlan) -> PlanVerdict:
    ops = [op for op in plan.ops if not _is_constant(op)]
    convs = _count(op for op in ops if _is_conv(op))
    others = _count(op for op in ops if not _is_conv(op))
    fault = None
    if plan.fault is not None:
        fault = f"Core ML made no plan: {plan.fault}"
    elif convs.off:
        fault = f"{convs.off} of {sum(convs)} convolutions leave the Neural Engine"
    elif convs.unknown:
        fault = f"the plan has no device for {convs.unknown} of {sum(convs)} convolutions"
    elif others.off:
        fault = f"{others.off} of {sum(others)} other operations leave the Neural Engine"
    elif not convs.on:
        fault = "the plan has no convolutions"
    return PlanVerdict(convs, others, tuple(_off_engine(ops)), fault)


def planned_rows(artifact: Artifact) -> tuple[int, ...]:
    """Return the row counts to plan for: those of the engine and 1, or of static functions."""
    some = (1, artifact.decode_rows, artifact.rows)
    return tuple(sorted({*(artifact.functions or some)}))


def _is_constant(op: PlannedOp) -> bool:
    """Return True for constants and their decompression, which do not run on a device."""
    return op.type == "const" or op.type.startswith("constexpr_")


def _is_conv(op: PlannedOp | OffEngine) -> bool:
    return op.type.startswith("conv")


def _count(ops: Iterator[PlannedOp]) -> Counts:
    where = Counter(op.preferred for op in ops)
    on, unknown = where[NEURAL_ENGINE], where[None]
    return Counts(on, where.total() - on - unknown, unknown)


def _off_engine(ops: Sequence[PlannedOp]) -> list[OffEngine]:
    kinds: dict[tuple[str, str], list[PlannedOp]] = {}
    for op in ops:
        if op.preferred != NEURAL_ENGINE:
            kinds.setdefault((op.type, op.preferred or UNKNOWN), []).append(op)
    off_engine = [
        OffEngine(
            kind,
            device,
            len(group),
            sum(NEURAL_ENGINE in (op.supported or ()) for op in group),
            None if all(op.cost is None for op in group) else sum(op.cost or 0.0 for op in group),
        )
        for (kind, device), group in kinds.items()
    ]
    return sorted(
        off_engine, key=lambda entry: (not _is_conv(entry), -(entry.cost or 0.0), entry.type)
    )


def _record(artifact: Artifact, units: str, progress: Progress) -> RecordedPlans:
    calls = list(_planned_calls(artifact))
    plans: list[ComputePlan] = []
    with progress.task("Core ML's plans", len(calls), unit="plans") as reach:
        for package, rows in calls:
            function = artifact.function(rows)
            plans.append(
                compute_plan.record(artifact.folder, package, rows, function=function, units=units)
            )
            reach(len(plans))
    made_by = f"paceline {paceline.__version__}"
    about = artifact.fingerprint, units, platform.platform(), made_by
    return RecordedPlans("coreml-plans", 1, *about, tuple(plans))


def _planned_calls(artifact: Artifact) -> Iterator[tuple[str, int]]:
    for shard in (*artifact.layer_shards, *artifact.head_shards):
        for rows in planned_rows(artifact):
            yield shard.path, rows


def _read(path: Path, artifact: Artifact) -> RecordedPlans:
    recording = validated(RecordedPlans, read_json(path), str(path), error=ModelError)
    if recording.fingerprint != artifact.fingerprint:
        raise ModelError(
            f"{path} has plans of another artifact, not {artifact.folder}; record them again"
        )
    return recording


def _report(artifact: Artifact, recording: RecordedPlans) -> Report:
    recorded = {(plan.package, plan.rows): plan for plan in recording.plans}
    plans: list[dict[str, Any]] = []
    for package, rows in _planned_calls(artifact):
        missing = ComputePlan(package, rows, None, fault="it is not in the recording")
        plan = recorded.get((package, rows), missing)
        verdict = evaluate(plan)
        plans.append(
            {
                "package": package,
                "rows": rows,
                "function": plan.function,
                "passed": verdict.fault is None,
                "fault": verdict.fault,
                "convs": verdict.convs._asdict(),
                "others": verdict.others._asdict(),
                "elsewhere": [group._asdict() for group in verdict.elsewhere],
            }
        )
    failed = [plan for plan in plans if not plan["passed"]]
    value = {
        "artifact": artifact.name,
        "fingerprint": recording.fingerprint,
        "units": recording.units,
        "system": recording.system,
        "made_by": recording.made_by,
        "rows": list(planned_rows(artifact)),
        "passed": not failed,
        "plans": plans,
    }
    unknown = sum(plan["others"]["unknown"] for plan in plans)
    others = f"; the plans have no device for {unknown} operations" if unknown else ""
    lines = [
        *(f"{plan['package']} at T = {plan['rows']}: {plan['fault']}" for plan in failed),
        _planned_shapes(artifact),
        f"verdict: operations of {artifact.name} {'do NOT all' if failed else 'all'} stay on the "
        f"Neural Engine in Core ML's plan for {recording.units} on {recording.system}{others}; "
        "a plan is not a measurement",
    ]
    heads = ["package", "T", "convs on", "off", "unknown", "others on", "off", "unknown", "passes"]
    counted = [
        [
            plan["package"],
            *map(str, (plan["rows"], *plan["convs"].values(), *plan["others"].values())),
            "yes" if plan["passed"] else "NO",
        ]
        for plan in plans
    ]
    off_heads = ["package", "T", "operation", "runs on", "ops", "NE could", "of the cost"]
    off = [
        [
            plan["package"],
            *map(str, (plan["rows"], *list(group.values())[:-1])),
            "" if group["cost"] is None else f"{100 * group['cost']:.1f} %",
        ]
        for plan in plans
        for group in plan["elsewhere"]
    ]
    tables: list[Table] = [
        ("on and off the Neural Engine", heads, counted),
        ("off the Neural Engine", off_heads, off),
    ]
    return Report(value, not failed, "\n".join(lines), tables)


def _planned_shapes(artifact: Artifact) -> str:
    planned = " and ".join(f"T = {rows}" for rows in planned_rows(artifact))
    if len(artifact.functions) == 1:
        return f"planned: {planned}, in every pass"
    if artifact.functions:
        return f"planned: {planned}, each in its own function"
    return (
        f"planned: {planned}, each as the default shape of a copy of the packages. They take any T "
        f"up to {artifact.rows}, and shapes other than a package's own default (T = 1) may run off "
        "the Neural Engine despite the plan (coremltools issue 2370): measure them, or convert "
        "without --flexible"
    )
