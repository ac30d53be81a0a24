"""The checks of an artifact: measurements, and messages about faults.

They compare the outputs of `run_shards` and `reference` by the criteria of `compare`, and run no
model. Invariant: a fault names the first file, output or mode that has it; later ones are counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.storage.coreml import EMBEDDINGS
from paceline_coreml.conversion.family import Family
from paceline_coreml.engine.artifact import ROTARY, Artifact
from paceline_coreml.golden.compare import (
    Nearness,
    Parity,
    centred,
    cosines,
    difference,
    nearness,
    parity,
)
from paceline_coreml.golden.reference import ReferenceOutput
from paceline_coreml.golden.run_shards import LOGITS, ArtifactOutput, outputs_of

Floats = npt.NDArray[Any]

BLOCK_COSINE = 0.999
"""Minimum cosine between modes on a device, whose kernels may sum in different orders."""

GRAPH_COSINE = 0.9999
"""Minimum cosine of rows without rounding: both sides have the same weights, in float32."""

MARGIN = 0.5
"""Minimum nats between the two best tokens of a clear row, in the reference's logits."""

FORMAT_FACTOR = 4.0
"""Maximum precision loss of a number format / the loss of the reference's own float16 run. It has
fewer roundings: transformers adds in float32."""

_MIN_LOSS, _USUAL_LOSS = 1e-5, 2.5e-3
"""A loss that is always allowed, and one of a reference that overflows in float16."""

_ANGLE = 1e-3
"""Tolerance for cosines and sines in a rotary table: about float16's precision."""

_CHUNK = 1 << 14
"""Rows of a file compared at once."""


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


def file_faults(artifact: Artifact, family: Family) -> list[str]:
    """Return faults in files of numbers."""
    stored = np.load(artifact.folder / EMBEDDINGS, mmap_mode="r")
    rotary = np.load(artifact.folder / ROTARY)
    by_position = rotary.swapaxes(0, 1), family.rope_tables().swapaxes(0, 1)
    return [
        *_file_fault(EMBEDDINGS, "token", stored, family.embeddings().numpy(), 0),
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


def check_layers(
    artifact: Artifact,
    rows: Sequence[str],
    outputs: ArtifactOutput,
    reference: ReferenceOutput,
) -> Iterator[LayerCheck]:
    """Compare embeddings, which are in the outputs, and every layer with transformers."""
    places = [(str(output), output.layer) for output in outputs_of(artifact)]
    for name, layer in [(EMBEDDINGS, None), *places]:
        # transformers does not return the extra channels of a family's stream.
        actual = outputs[name][:, : artifact.hidden_size]
        expected = reference.streams[0 if layer is None else layer + 1]
        yield LayerCheck(name, layer, nearness(rows, actual, expected))


def layer_faults(layers: Sequence[LayerCheck]) -> list[str]:
    """Return the first faulty output and the number of later ones."""
    bad = [layer for layer in layers if layer.nearness.faults(GRAPH_COSINE)]
    if not bad:
        return []
    first, *others = bad
    where = "embeddings" if first.layer is None else f"layer {first.layer}"
    after = len(layers) - layers.index(first) - 1
    rest = f" (and {len(others)} of the {after} outputs after it)" if others else ""
    return [f"{where}, {first.name}: {'; '.join(first.nearness.faults(GRAPH_COSINE))}{rest}"]


@dataclass(frozen=True, slots=True)
class LogitsCheck:
    nearness: Nearness
    """Nearness of centered logits: a common offset does not change the top token."""
    ordinary: Parity

    def faults(self) -> list[str]:
        return [f"logits: {fault}" for fault in self.nearness.faults(GRAPH_COSINE)]


def check_logits(
    rows: Sequence[str], outputs: ArtifactOutput, reference: ReferenceOutput
) -> LogitsCheck:
    actual, expected = centred(outputs[LOGITS]), centred(reference.logits)
    return LogitsCheck(nearness(rows, actual, expected), parity(rows, actual, expected, MARGIN))


def weights_faults(weights: Parity, max_divergence: float | None) -> list[str]:
    if max_divergence is None or weights.divergence <= max_divergence:
        return []
    return [
        f"they diverge by {weights.divergence:.4f} nats from the checkpoint's, expected at most "
        f"{max_divergence}"
    ]


@dataclass(frozen=True, slots=True)
class FormatCheck:
    """The precision that a number format loses: 1 - the cosine of the median row."""

    loss: float
    """Of the artifact, compared with its own graph without rounding."""
    reference_loss: float
    """Of transformers in float16, compared with float32; inf if that overflows."""

    def faults(self, name: str) -> list[str]:
        # A reference that overflows sets no limit.
        reference = self.reference_loss if np.isfinite(self.reference_loss) else _USUAL_LOSS
        allowed = max(FORMAT_FACTOR * reference, _MIN_LOSS)
        if self.loss <= allowed:
            return []
        return [
            f"{name} loses {self.loss:.3g} of the median row's cosine, expected at most "
            f"{allowed:.3g}: the reference's own float16 run loses {self.reference_loss:.3g}"
        ]


def format_loss(actual: Floats, expected: Floats) -> float:
    """Return 1 - the median row's cosine, or inf if an actual number is not finite.

    The median, because rounding may route a few rows to another expert.
    """
    if not np.isfinite(actual).all():
        return np.inf
    return float(1 - np.median(cosines(actual, expected)))
