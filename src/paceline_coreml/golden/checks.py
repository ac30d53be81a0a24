"""The checks of an artifact: measurements, and messages about faults.

They compare the outputs of `run_shards` and `reference` by the criteria of `compare`, and run no
model. Invariant: a fault names the first file, output or mode that has it; later ones are counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.storage.coreml import EMBEDDINGS
from paceline_coreml.conversion.family import Family
from paceline_coreml.engine.artifact import ROTARY, Artifact
from paceline_coreml.golden.compare import (
    Nearness,
    Parity,
    RowFacts,
    centred,
    cosines,
    difference,
    nearest,
    nearness,
    parity,
)
from paceline_coreml.golden.reference import ReferenceOutput
from paceline_coreml.golden.run_shards import LOGITS, ArtifactOutput, outputs_of

Floats = npt.NDArray[Any]

BLOCK_COSINE = 0.999
"""Minimum cosine between modes on a device, whose kernels may sum in different orders."""

REROUTED_PICKS = 0.9
"""Minimum ratio of equal top tokens among the clear ones, for models with experts."""

_ANGLE = 1e-3
"""Tolerance for cosines and sines in a rotary table: about float16's precision."""

_CHUNK = 1 << 14
"""Rows of a file compared at once."""


class FaultLimits(NamedTuple):
    threshold: float
    """Minimum cosine per row."""
    margin: float
    """Maximum nats between the reference's top token and the artifact's; see `MARGIN`."""
    experts: bool
    """True if the model has experts."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement between a mode's outputs and those of full blocks."""

    way: str
    """The mode."""
    difference: float
    """Largest absolute difference of any element."""
    cosine: float
    """Minimum over all rows of all outputs."""
    begins: str
    """The first output that differs; empty if none does."""

    def faults(self, *, exact: bool) -> list[str]:
        """Return a fault if outputs differ: in any bit if `exact`, else by `BLOCK_COSINE`."""
        if self.difference == 0 or (not exact and self.cosine >= BLOCK_COSINE):
            return []
        return [
            f"{self.way}: {self.begins} differs from blocks; the largest difference is "
            f"{self.difference:.3g}, and the minimum cosine is {self.cosine:.4f}"
        ]


def agreement(way: str, outputs: ArtifactOutput, blocks: ArtifactOutput) -> Agreement:
    differences = {name: difference(rows, blocks[name]) for name, rows in outputs.items()}
    differing = [name for name, off in differences.items() if off > 0]
    lowest = min((cosines(outputs[name], blocks[name]).min() for name in differing), default=1.0)
    begins = differing[0] if differing else ""
    return Agreement(way, max(differences.values()), float(lowest), begins)


def check_sizes(artifact: Artifact, checkpoint: Path, family: Family) -> None:
    """Raise ModelError if an artifact was converted from another checkpoint."""
    sizes = ("family", "layers", "hidden_size", "vocab_size", "stream_size", "labels", "drafts")
    pairs = [(name, getattr(artifact, name), getattr(family.shape, name)) for name in sizes]
    differing = [f"{name} {ours}, not {theirs}" for name, ours, theirs in pairs if ours != theirs]
    if differing:
        raise ModelError(
            f"{artifact.folder} was not converted from {checkpoint}: it has "
            f"{', '.join(differing)}; use the checkpoint that it was converted from"
        )


def file_faults(artifact: Artifact, family: Family, embeddings: Floats) -> list[str]:
    """Return faults in files of numbers; the checkpoint has `embeddings`, [vocab, hidden_size]."""
    stored = np.load(artifact.folder / EMBEDDINGS, mmap_mode="r")
    rotary = np.load(artifact.folder / ROTARY)
    angles = np.stack(family.rope_tables())
    by_position = rotary.swapaxes(0, 1), angles.swapaxes(0, 1)
    return [
        *_file_fault(EMBEDDINGS, "token", stored, embeddings, 0),
        *_file_fault(ROTARY, "position", *by_position, _ANGLE),
    ]


def _file_fault(
    name: str, what: str, actual: Floats, expected: Floats, tolerance: float
) -> Iterator[str]:
    """Yield a fault if a file's rows differ from the checkpoint's, cast to the file's dtype."""
    if actual.shape != expected.shape:
        yield f"{name}: has shape {list(actual.shape)}, expected {list(expected.shape)}"
        return
    for at in range(0, len(actual), _CHUNK):
        part = slice(at, at + _CHUNK)
        off = np.abs(actual[part] - expected[part].astype(actual.dtype))
        wrong = ~(off <= tolerance).reshape(len(off), -1).all(1)  # so that a NaN counts
        if wrong.any():
            first = at + int(wrong.argmax())
            yield f"{name}: differs from the checkpoint's, starting at {what} {first}"
            return


@dataclass(frozen=True, slots=True)
class LayerCheck:
    name: str
    layer: int | None
    """Layer index, or None for the embeddings."""
    nearness: Nearness
    takes_for: int | None
    """The reference's other layer that the output matches better; -1: the embeddings."""

    def faults(self, limits: FaultLimits) -> list[str]:
        messages = self.nearness.faults(limits.threshold, experts=limits.experts)
        if self.takes_for is not None:
            what = f"layer {self.takes_for}" if self.takes_for >= 0 else "the embeddings"
            messages.append(f"it matches the reference after {what}")
        return messages


def check_layers(
    artifact: Artifact,
    rows: RowFacts,
    outputs: ArtifactOutput,
    reference: ReferenceOutput,
    limits: FaultLimits,
) -> Iterator[LayerCheck]:
    """Compare embeddings, which are in the outputs, and every layer with transformers."""
    places = [(str(output), output.layer) for output in outputs_of(artifact)]
    for name, layer in [(EMBEDDINGS, None), *places]:
        # transformers does not return the extra channels of a family's stream.
        actual = outputs[name][:, : artifact.hidden_size]
        own_place = 0 if layer is None else layer + 1
        place = nearest(rows, actual, reference.streams)
        near = nearness(rows, actual, reference.streams[place])
        swapped = place != own_place and near.cosine.median >= limits.threshold
        if place != own_place:
            near = nearness(rows, actual, reference.streams[own_place])
        yield LayerCheck(name, layer, near, place - 1 if swapped else None)


def layer_faults(layers: Sequence[LayerCheck], limits: FaultLimits) -> list[str]:
    """Return the first faulty output and the number of later ones, and all swapped layers."""
    messages: list[str] = []
    bad = [(layer, faults) for layer in layers if (faults := layer.faults(limits))]
    for layer, faults in bad:
        if messages and layer.takes_for is None:
            continue
        where = "embeddings" if layer.layer is None else f"layer {layer.layer}"
        rest = ""
        if not messages and len(bad) > 1:
            after = len(layers) - layers.index(layer) - 1
            rest = f" (and {len(bad) - 1} of the {after} outputs after it)"
        messages.append(f"{where}, {layer.name}: {'; '.join(faults)}{rest}")
    return messages


@dataclass(frozen=True, slots=True)
class LogitsCheck:
    nearness: Nearness
    """Nearness of centered logits: a common offset does not change the top token."""
    ordinary: Parity
    misplaced: Sequence[str]
    """Messages about head shards that compute logits of other tokens."""

    def faults(self, limits: FaultLimits) -> list[str]:
        near = self.nearness.faults(limits.threshold, experts=limits.experts)
        messages = [*self.misplaced, *(f"logits: {fault}" for fault in near)]
        picks = self.ordinary
        if picks.worst <= limits.margin:
            return messages
        if not limits.experts:
            messages.append(
                f"picks: at {picks.at} the reference rates the top token {picks.worst:.3g} nats "
                f"below its own, expected at most {limits.margin}"
            )
        elif picks.decided_equal < REROUTED_PICKS * picks.decided:
            messages.append(
                f"picks: {picks.decided_equal} of the {picks.decided} top tokens that lead by more "
                f"than {limits.margin} nats in the reference are equal, "
                f"expected {REROUTED_PICKS:.0%}"
            )
        return messages


def check_logits(
    artifact: Artifact,
    rows: RowFacts,
    outputs: ArtifactOutput,
    reference: ReferenceOutput,
    limits: FaultLimits,
) -> LogitsCheck:
    actual, expected = centred(outputs[LOGITS]), centred(reference.logits)
    return LogitsCheck(
        nearness(rows, actual, expected),
        parity(rows, ~rows.low, actual, expected, limits.margin),
        list(_misplaced(artifact, rows, actual, expected, limits.threshold)),
    )


def _misplaced(
    artifact: Artifact, rows: RowFacts, actual: Floats, expected: Floats, threshold: float
) -> Iterator[str]:
    """Yield messages about head shards that are in the place of another."""
    for shard in artifact.head_shards:
        size, ours = shard.end - shard.start, actual[:, shard.start : shard.end]
        alike = [other for other in artifact.head_shards if other.end - other.start == size]
        theirs = [expected[:, other.start : other.end] for other in alike]
        place = nearest(rows, ours, theirs)
        if alike[place] != shard and nearness(rows, ours, theirs[place]).cosine.median >= threshold:
            yield (
                f"{shard.path}: is for tokens {shard.start} to {shard.end - 1}, but has the "
                f"logits of {alike[place].start} to {alike[place].end - 1}"
            )
