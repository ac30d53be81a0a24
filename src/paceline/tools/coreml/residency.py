"""Whether an artifact would stay on the Neural Engine: Core ML's plans, judged shard by shard.

Knows plans as plain data, so that one that was recorded on a Mac is judged anywhere. The rule: a
shard passes if every convolution of it prefers the Neural Engine with every number of rows that is
asked about. Preferred, not supported: what the Neural Engine could run may well be planned
elsewhere. What a plan does not say is no pass; operations that are no convolutions are listed.

It is a plan, not a measurement: what it says holds if the clock agrees.
"""

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import paceline
from paceline.engines.coreml.artifact import Artifact, read_artifact
from paceline.engines.coreml.packages import UNITS, on_a_mac
from paceline.errors import InvalidRequest, ModelError
from paceline.models import QUIET, Progress
from paceline.storage.files import read_json, write_json, writing
from paceline.storage.report import Report, Table
from paceline.tools.coreml import compute_plan
from paceline.tools.coreml.compute_plan import NEURAL_ENGINE, Plan, PlannedOp, plan_from

KIND = "coreml-plans"
VERSION = 1

UNKNOWN = "unknown"
"""Where an operation runs of which the plan says nothing."""


class Counts(NamedTuple):
    """Operations by where they would run."""

    on: int
    """The Neural Engine."""
    off: int
    unknown: int


class Elsewhere(NamedTuple):
    """Operations of one type that a plan has off the Neural Engine."""

    type: str
    device: str
    """Or `UNKNOWN`."""
    ops: int
    able: int
    """Those among them that the Neural Engine could run."""
    cost: float | None
    """Their share of the whole, 0 to 1; None: the plan does not say."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a plan comes to."""

    convs: Counts
    others: Counts
    """Operations that compute and are no convolutions."""
    elsewhere: tuple[Elsewhere, ...]
    """Convolutions first, then by their cost."""
    fault: str | None
    """Why it does not pass; None: it does."""


class Recording(NamedTuple):
    """Plans of an artifact, and where they come from."""

    about: dict[str, Any]
    """`fingerprint` of the artifact, `units`, `system`."""
    plans: Sequence[Plan]


def report(
    folder: Path,
    *,
    units: str = "cpu-and-ne",
    recorded: Path | None = None,
    record: Path | None = None,
    progress: Progress = QUIET,
) -> Report:
    """Judge the plans of all packages of an artifact.

    Args:
        folder: the artifact.
        units: compute units to plan for, one of `packages.UNITS`.
        recorded: a file of plans that were recorded before; None: Core ML makes them, on a Mac.
        record: a file to keep the plans in.
        progress: told how far it is.

    Raises:
        ModelError: the artifact is not whole, or the file is no recording, or one of another.
        InvalidRequest: this is no Mac and nothing was recorded, or the file cannot be written, or
            there are no such units.
    """
    if units not in UNITS:
        raise InvalidRequest(f"compute units are {units!r}; expected one of {', '.join(UNITS)}")
    if recorded is not None and record is not None:
        raise InvalidRequest("plans are either recorded or judged; leave one of the files away")
    artifact = read_artifact(folder)
    if recorded is not None:
        found = _read(recorded, artifact)
    elif on_a_mac():
        found = _ask(artifact, units, progress)
    else:
        raise InvalidRequest(
            f"plans are made by Core ML, on a Mac: run `paceline coreml residency {folder} "
            "--record FILE` there, and judge them here with --recorded FILE"
        )
    if record is not None:
        with writing(record):
            value = {"kind": KIND, "version": VERSION, **found.about}
            write_json(record, {**value, "plans": [asdict(plan) for plan in found.plans]})
    return _reported(artifact, found)


def judge(plan: Plan) -> Verdict:
    """Count a plan's operations, and say whether its convolutions stay."""
    ops = [op for op in plan.ops if not _is_constant(op)]
    convs = _count(op for op in ops if _is_conv(op))
    others = _count(op for op in ops if not _is_conv(op))
    fault = None
    if plan.fault is not None:
        fault = f"Core ML made no plan: {plan.fault}"
    elif convs.off:
        fault = f"{convs.off} of {sum(convs)} convolutions leave the Neural Engine"
    elif convs.unknown:
        fault = f"the plan does not say where {convs.unknown} of {sum(convs)} convolutions run"
    elif not convs.on:
        fault = "the plan has no convolutions"
    return Verdict(convs, others, tuple(_elsewhere(ops)), fault)


def rows_to_see(artifact: Artifact) -> tuple[int, ...]:
    """The numbers of rows that plans are made for: one and the most, or all functions there are."""
    return tuple(sorted(set(artifact.functions or (1, artifact.rows))))


def _is_constant(op: PlannedOp) -> bool:
    """Constants and what unpacks them: not computed in a call, and on no device."""
    return op.type == "const" or op.type.startswith("constexpr_")


def _is_conv(op: PlannedOp | Elsewhere) -> bool:
    return op.type.startswith("conv")


def _count(ops: Iterator[PlannedOp]) -> Counts:
    where = Counter(op.preferred for op in ops)
    on, unknown = where[NEURAL_ENGINE], where[None]
    return Counts(on, where.total() - on - unknown, unknown)


def _elsewhere(ops: Sequence[PlannedOp]) -> list[Elsewhere]:
    kinds: dict[tuple[str, str], list[PlannedOp]] = {}
    for op in ops:
        if op.preferred != NEURAL_ENGINE:
            kinds.setdefault((op.type, op.preferred or UNKNOWN), []).append(op)
    found = [
        Elsewhere(
            kind,
            device,
            len(each),
            sum(NEURAL_ENGINE in (op.supported or ()) for op in each),
            None if all(op.cost is None for op in each) else sum(op.cost or 0.0 for op in each),
        )
        for (kind, device), each in kinds.items()
    ]
    return sorted(found, key=lambda one: (not _is_conv(one), -(one.cost or 0.0), one.type))


def _ask(artifact: Artifact, units: str, progress: Progress) -> Recording:
    """Have Core ML plan all packages."""
    wanted = list(_wanted(artifact))
    plans = []
    with progress.task("asking Core ML for its plans", len(wanted), unit="plans") as reach:
        for package, rows in wanted:
            function = f"t{rows}" if artifact.functions else None
            plans.append(
                compute_plan.record(artifact.folder, package, rows, function=function, units=units)
            )
            reach(len(plans))
    about = {
        "fingerprint": artifact.fingerprint,
        "units": units,
        "system": platform.platform(),
        "made_by": f"paceline {paceline.__version__}",
    }
    return Recording(about, plans)


def _wanted(artifact: Artifact) -> Iterator[tuple[str, int]]:
    for shard in (*artifact.layer_shards, *artifact.head_shards):
        for rows in rows_to_see(artifact):
            yield shard.path, rows


def _read(path: Path, artifact: Artifact) -> Recording:
    value = read_json(path)
    if value.get("kind") != KIND or value.get("version") != VERSION:
        raise ModelError(
            f"{path} is a {value.get('kind')} of version {value.get('version')}; expected {KIND} "
            f"of version {VERSION}, as --record writes them"
        )
    try:
        about = {key: value[key] for key in ("fingerprint", "units", "system", "made_by")}
        plans = [plan_from(each) for each in value["plans"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} is no whole recording of plans ({error}); record it again"
        ) from error
    if about["fingerprint"] != artifact.fingerprint:
        raise ModelError(
            f"{path} has the plans of another artifact than {artifact.folder}; record them again"
        )
    return Recording(about, plans)


def _reported(artifact: Artifact, recording: Recording) -> Report:
    plans = {(plan.package, plan.rows): plan for plan in recording.plans}
    judged = []
    for package, rows in _wanted(artifact):
        plan = plans.get((package, rows))
        if plan is None:
            plan = Plan(package, rows, None, fault="it was not asked for")
        judged.append((plan, judge(plan)))
    failed = [(plan, verdict.fault) for plan, verdict in judged if verdict.fault is not None]
    value = {
        "artifact": artifact.name,
        **recording.about,
        "rows": list(rows_to_see(artifact)),
        "passed": not failed,
        "plans": [
            {
                "package": plan.package,
                "rows": plan.rows,
                "function": plan.function,
                "passed": verdict.fault is None,
                "fault": verdict.fault,
                "convs": verdict.convs._asdict(),
                "others": verdict.others._asdict(),
                "elsewhere": [one._asdict() for one in verdict.elsewhere],
            }
            for plan, verdict in judged
        ],
    }
    left = sum(verdict.others.off + verdict.others.unknown for _, verdict in judged)
    others = f", and {left} other operations do not or may not" if left else ""
    lines = [
        *(f"{plan.package} at T = {plan.rows}: {fault}" for plan, fault in failed),
        _shapes_seen(artifact),
        f"verdict: convolutions of {artifact.name} {'do NOT all' if failed else 'all'} stay on the "
        f"Neural Engine, as Core ML plans it for {recording.about['units']} on "
        f"{recording.about['system']}{others}; a plan is no measurement",
    ]
    return Report(value, not failed, "\n".join(lines), [_plan_table(judged), _off_table(judged)])


def _shapes_seen(artifact: Artifact) -> str:
    """Which shapes the plans are of."""
    seen = " and ".join(f"T = {rows}" for rows in rows_to_see(artifact))
    if artifact.functions:
        other = "" if 1 in artifact.functions else "; T = 1 has none and was not seen"
        return f"seen: {seen}, each in a function of its own{other}"
    return (
        f"seen: {seen}, each as the default shape of a copy of the packages. They take any T up to "
        f"{artifact.rows}, and shapes other than a package's own default (T = 1) may run off the "
        "Neural Engine whatever is planned (coremltools issue 2370): measure them, or convert with "
        f"--functions 1,{artifact.rows}"
    )


def _plan_table(judged: Sequence[tuple[Plan, Verdict]]) -> Table:
    rows = [
        [
            plan.package,
            str(plan.rows),
            *(str(count) for count in (*verdict.convs, *verdict.others)),
            "yes" if verdict.fault is None else "NO",
        ]
        for plan, verdict in judged
    ]
    head = ["package", "T", "convs on", "off", "unknown", "others on", "off", "unknown", "passes"]
    return "on and off the Neural Engine", head, rows


def _off_table(judged: Sequence[tuple[Plan, Verdict]]) -> Table:
    rows = [
        [
            plan.package,
            str(plan.rows),
            one.type,
            one.device,
            str(one.ops),
            str(one.able),
            "" if one.cost is None else f"{100 * one.cost:.1f} %",
        ]
        for plan, verdict in judged
        for one in verdict.elsewhere
    ]
    head = ["package", "T", "operation", "runs on", "ops", "NE could", "of the cost"]
    return "off the Neural Engine", head, rows
