"""Converts one layer and checks it: rules, Core ML's plan, rows one by one, and the reference.

Off a Mac the layer runs in the rehearsal, and the check of Core ML's plan is not made.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.storage.coreml import fingerprint_of
from paceline.storage.files import sha256_of
from paceline_coreml import compute_plan
from paceline_coreml.conversion.compress import compress
from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.shards import Sizes, convert_layers
from paceline_coreml.conversion.stateless import state_shapes
from paceline_coreml.engine import packages
from paceline_coreml.engine.artifact import Artifact, Shard
from paceline_coreml.engine.inputs import CallInputs
from paceline_coreml.engine.packages import Package, PackageOpener
from paceline_coreml.golden.compare import RowPairs, cosines, difference, nearness
from paceline_coreml.lint import lint
from paceline_coreml.residency import evaluate

Floats = npt.NDArray[np.float32]

PACKAGE: Final = "layer.mlpackage"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool | None
    """None: it cannot be made on this machine."""
    what: str


class Rows(NamedTuple):
    """Rows for a layer."""

    stream: Floats
    """[n, stream_size]: input."""
    expected: Floats
    """[n, hidden_size]: hidden states after the layer, in float32."""
    experts: bool = False
    """Whether rows are routed, so that a few may go to another expert."""


class Settings(NamedTuple):
    """How a layer is run and judged."""

    units: str
    """One of `packages.UNITS`, on a Mac."""
    threshold: float
    """Minimum cosine of a row."""
    say: Callable[[str], None]


def convert_layer(
    family: Family, index: int, folder: Path, *, sizes: Sizes, weights: str
) -> Artifact:
    """Convert layer `index` to a package in `folder`; `weights` is one of `compress.FORMS`.

    Returns an artifact without a head.
    """
    program = compress(convert_layers(family, index, index + 1, sizes=sizes), weights)
    program.save(str(folder / PACKAGE))
    shape = family.shape
    outside = state_shapes(family, index) if sizes.stateless else {}
    files = {
        path.relative_to(folder).as_posix(): sha256_of(path)
        for path in folder.rglob("*")
        if path.is_file()
    }
    return Artifact(
        name=f"layer {index}",
        family=shape.family,
        task=shape.task,
        labels=(),
        reach=0,
        layers=1,
        hidden_size=shape.hidden_size,
        stream_size=shape.stream_size,
        vocab_size=shape.vocab_size,
        slots=sizes.slots,
        rows=sizes.rows,
        functions=(sizes.rows,),
        ring=sizes.conv_slots if shape.lags else 0,
        lags=shape.lags,
        layer_shards=(Shard(PACKAGE, 0, 1, states=outside),),
        head_shards=(),
        fingerprint=fingerprint_of(files),
        files={},
        folder=folder,
    )


class LayerChecks:
    """The checks of one layer."""

    def __init__(self, artifact: Artifact, rotary: Any, rows: Rows, settings: Settings) -> None:
        """`rotary` is [2, slots, r], cosines and sines."""
        self.milliseconds: float | None = None
        """Median time of a call, after the first."""
        self._artifact, self._rotary, self._rows, self._settings = artifact, rotary, rows, settings

    def run(self) -> list[Check]:
        """All checks, up to the first that fails."""
        checks: list[Check] = []
        for check in self._checks():
            checks.append(check)
            if check.passed is False:
                break
        return checks

    def _checks(self) -> Iterator[Check]:
        yield self._lint()
        yield self._residency()
        try:
            blocks, singles = self._blocks_and_singles()
        except ModelError as error:
            yield Check("runs", False, str(error))
            return
        yield self._exact(blocks, singles)
        yield self._reference(blocks)

    def _lint(self) -> Check:
        findings = lint(self._artifact.folder / PACKAGE)
        failing = [finding for finding in findings if finding.verdict == "fail"]
        if failing:
            first = failing[0]
            return Check("rules", False, f"{first.rule} at {first.where}: {first.what}")
        warnings = sorted({finding.rule for finding in findings if finding.verdict == "warn"})
        return Check("rules", True, f"none fails; warnings: {', '.join(warnings) or 'none'}")

    def _residency(self) -> Check:
        if not packages.on_a_mac():
            return Check("residency", None, "Core ML plans where operations run, on a Mac")
        plan = compute_plan.record(
            self._artifact.folder,
            PACKAGE,
            self._artifact.rows,
            function=None,
            units=self._settings.units,
        )
        verdict = evaluate(plan)
        on = f"{verdict.convs.on} convolutions and {verdict.others.on} other operations on it"
        return Check("residency", verdict.fault is None, verdict.fault or on)

    def _blocks_and_singles(self) -> tuple[Floats, Floats]:
        """The rows after the layer, [n, stream_size]: in calls of T rows, and of one each.

        Raises ModelError if Core ML fails.
        """
        settings = self._settings
        opener = PackageOpener(
            self._artifact, units=settings.units, rounding="f16", say=settings.say
        )
        package = opener.open(PACKAGE, None)
        blocks, seconds = self._through(package, self._artifact.rows)
        singles, more = self._through(package, 1)
        self.milliseconds = 1000 * median([*seconds[1:], *more])
        return blocks, singles

    def _through(self, package: Package, rows: int) -> tuple[Floats, list[float]]:
        """Run all rows, `rows` of each call; seconds of every call."""
        artifact, stream = self._artifact, self._rows.stream
        inputs = CallInputs(
            artifact.rows, *self._rotary, conv_slots=artifact.conv_slots, lags=artifact.lags
        )
        hidden = np.zeros((1, artifact.stream_size, artifact.rows, 1), np.float32)
        state = package.make_state()
        blocks, seconds = [], []
        for start in range(0, len(stream), rows):
            block = stream[start : start + rows]
            hidden[0, :, : len(block), 0] = block.T
            hidden[0, :, len(block) :, 0] = 0
            call = {"hidden": hidden, **inputs.at(start, len(block))}
            begun = perf_counter()
            outputs = package.predict(call, state)
            seconds.append(perf_counter() - begun)
            blocks.append(outputs["out_hidden"][0, :, : len(block), 0].T.copy())
        return np.concatenate(blocks), seconds

    def _exact(self, blocks: Floats, singles: Floats) -> Check:
        """Rows must not depend on the other rows of their call, or speculation changes tokens."""
        rows, most = self._artifact.rows, difference({"": blocks}, {"": singles})
        if most == 0:
            return Check(
                "rows", True, f"those of calls of {rows} equal those of single calls, bit for bit"
            )
        cosine = cosines(blocks, singles).min()
        return Check(
            "rows",
            False,
            f"those of calls of {rows} differ from those of single calls by up to {most:.3g} "
            f"(minimum cosine {cosine:.6f}), so speculation would not be exact",
        )

    def _reference(self, blocks: Floats) -> Check:
        actual = blocks[:, : self._artifact.hidden_size]
        near = nearness([RowPairs("the layer", actual, self._rows.expected)])
        faults = near.faults(self._settings.threshold, experts=self._rows.experts)
        what = f"minimum cosine {near.cosine.worst:.5f}, of the first row {near.first:.5f}"
        return Check("float32", not faults, "; ".join(faults) or what)
