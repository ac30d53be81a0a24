"""The checks of an artifact, in functions of their own: measurements and named faults.

Compares the outputs of `run_shards` and `reference` with the criteria of `compare`; runs no model.
Invariant: a fault names the first file, output or call mode that shows it; later ones are counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelError
from paceline.storage.coreml import EMBEDDINGS
from paceline_coreml.conversion.family import Family
from paceline_coreml.engine.artifact import ROTARY, Artifact, Shard
from paceline_coreml.golden.compare import (
    Nearness,
    Parity,
    RowPairs,
    centred,
    cosines,
    difference,
    nearest,
    nearness,
    parity,
)
from paceline_coreml.golden.reference import ReferenceOutput
from paceline_coreml.golden.run_shards import ArtifactOutputs, embed, outputs_of
from paceline_coreml.golden.texts import Text

Floats = npt.NDArray[np.float32]

BLOCK_COSINE = 0.999
"""Minimum between call modes on a device, whose kernels may sum in another order."""

REROUTED_PICKS = 0.9
"""Minimum ratio of equal top tokens, of the decided ones, in a model with experts."""

_ANGLE = 1e-3
"""Tolerance of cosines and sines in a rotary table: about float16's precision."""


class Texts(NamedTuple):
    """The texts, and transformers' outputs by a text's name."""

    inputs: Sequence[Text]
    reference: Mapping[str, ReferenceOutput]

    def rows(self, actual: Mapping[str, Floats], expected: Mapping[str, Floats]) -> list[RowPairs]:
        """Pairs of rows, text by text."""
        return [RowPairs(t.name, actual[t.name], expected[t.name], t.low) for t in self.inputs]


def check_same_model(artifact: Artifact, family: Family, checkpoint: Path) -> None:
    """Raise ModelError if the artifact cannot have been converted from the checkpoint."""
    shape = family.shape
    differing = [
        f"{name} {ours}, not {theirs}"
        for name, ours, theirs in (
            ("family", artifact.family, shape.family),
            ("layers", artifact.layers, shape.layers),
            ("hidden_size", artifact.hidden_size, shape.hidden_size),
            ("vocab_size", artifact.vocab_size, shape.vocab_size),
            ("stream_size", artifact.stream_size, shape.stream_size),
        )
        if ours != theirs
    ]
    if differing:
        raise ModelError(
            f"{artifact.folder} was not made of {checkpoint}: it has {', '.join(differing)}; give "
            "the checkpoint of its conversion"
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the outputs of a call mode agree with those of full blocks."""

    way: str
    """The call mode."""
    difference: float
    """Largest absolute difference of any element."""
    cosine: float
    """Minimum over all rows of all outputs."""
    begins: str
    """The first output that differs; empty if none does."""

    def faults(self, *, exact: bool) -> list[str]:
        """A fault if outputs differ: by any bit if `exact`, else by `BLOCK_COSINE`."""
        if self.difference == 0 or (not exact and self.cosine >= BLOCK_COSINE):
            return []
        return [
            f"{self.way}: {self.begins} differs from blocks; the largest difference is "
            f"{self.difference:.3g}, the minimum cosine {self.cosine:.4f}"
        ]


def agreement(way: str, outputs: ArtifactOutputs, blocks: ArtifactOutputs) -> Agreement:
    """Compare the outputs that both have."""
    begins, largest, least = "", 0.0, 1.0
    common = list(next(iter(outputs.values())).outputs)
    pairs: list[tuple[str, Mapping[str, Floats], Mapping[str, Floats]]] = [
        (
            str(output),
            {text: run.outputs[output] for text, run in outputs.items()},
            {text: run.outputs[output] for text, run in blocks.items()},
        )
        for output in common
    ]
    pairs.append(("logits", _logits(outputs), _logits(blocks)))
    for name, ours, theirs in pairs:
        off = difference(ours, theirs)
        if off > 0:
            begins = begins or name
            largest = max(largest, off)
            least = min(least, *(cosines(ours[text], theirs[text]).min() for text in ours))
    return Agreement(way, largest, float(least), begins)


def embedding_faults(artifact: Artifact, expected: Floats) -> list[str]:
    """A fault if the embeddings differ from the checkpoint's, [vocab, hidden_size], in float16."""
    actual = np.load(artifact.folder / EMBEDDINGS, mmap_mode="r")
    if actual.shape != expected.shape:
        return [f"{EMBEDDINGS}: has shape {list(actual.shape)}, expected {list(expected.shape)}"]
    for at in range(0, len(actual), _CHUNK):
        part = slice(at, at + _CHUNK)
        differing = (actual[part] != expected[part].astype(np.float16)).any(axis=1)
        if differing.any():
            token = at + int(differing.argmax())
            return [f"{EMBEDDINGS}: differs from the checkpoint's from token {token} on"]
    return []


_CHUNK = 1 << 14
"""Embeddings compared at once."""


def rotary_faults(artifact: Artifact, family: Family) -> list[str]:
    """A fault if the rotary tables differ from the checkpoint's at any position."""
    actual = np.load(artifact.folder / ROTARY)
    expected = np.stack(family.rope_tables())
    if actual.shape != expected.shape:
        return [f"{ROTARY}: has shape {list(actual.shape)}, expected {list(expected.shape)}"]
    # Negated, so that a NaN counts.
    off = ~(np.abs(actual - expected) <= _ANGLE)
    if not off.any():
        return []
    first = int(off.any(axis=(0, 2)).argmax())
    return [
        f"{ROTARY}: differs from the checkpoint's from position {first} on, by up to "
        f"{np.abs(actual - expected).max():.3g}"
    ]


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """The comparison of one layer output, or of the embeddings."""

    name: str
    layer: int | None
    """None: the embeddings."""
    nearness: Nearness
    takes_for: int | None
    """The other layer of the reference that the output matches better; -1: the embeddings."""

    def faults(self, threshold: float, *, experts: bool) -> list[str]:
        """Faults as messages."""
        messages = self.nearness.faults(threshold, experts=experts)
        if self.takes_for is not None:
            what = f"layer {self.takes_for}" if self.takes_for >= 0 else "the embeddings"
            messages.append(f"it matches the reference after {what}")
        return messages


def check_layers(
    artifact: Artifact, texts: Texts, outputs: ArtifactOutputs, threshold: float
) -> Iterator[LayerCheck]:
    """Compare the embeddings and every layer output with transformers."""
    places: list[tuple[str, int | None, Mapping[str, Floats]]] = [
        (EMBEDDINGS, None, embed(artifact, texts.inputs))
    ]
    # transformers does not show the extra channels of a family's stream.
    places += [
        (
            str(output),
            output.layer,
            {text: run.outputs[output][:, : artifact.hidden_size] for text, run in outputs.items()},
        )
        for output in outputs_of(artifact)
    ]
    for name, layer, actual in places:
        own_place = 0 if layer is None else layer + 1
        candidates = [
            texts.rows(actual, {text: out.streams[place] for text, out in texts.reference.items()})
            for place in range(artifact.layers + 1)
        ]
        place = nearest(candidates)
        near = nearness(candidates[own_place])
        is_swapped = place != own_place and nearness(candidates[place]).cosine.median >= threshold
        yield LayerCheck(name, layer, near, place - 1 if is_swapped else None)


@dataclass(frozen=True, slots=True)
class LogitsCheck:
    """The comparison of logits and of top tokens."""

    nearness: Nearness
    """Of centred logits: a common offset does not change the top token."""
    ordinary: Parity
    low_norm: Parity
    """After tokens of low norm; informative only."""
    misplaced: Sequence[str]
    """Messages about shards of the head that give the logits of other tokens."""

    def faults(self, threshold: float, margin: float, *, experts: bool) -> list[str]:
        """Faults as messages."""
        near = self.nearness.faults(threshold, experts=experts)
        messages = [*self.misplaced, *(f"logits: {fault}" for fault in near)]
        picks = self.ordinary
        if picks.worst <= margin:
            return messages
        if not experts:
            messages.append(
                f"picks: at {picks.at} the reference rates the top token {picks.worst:.3g} nats "
                f"below its own, expected {margin} at most"
            )
        elif picks.decided_equal < REROUTED_PICKS * picks.decided:
            messages.append(
                f"picks: {picks.decided_equal} of the {picks.decided} top tokens that the "
                f"reference decides by more than {margin} nats are equal, "
                f"expected {REROUTED_PICKS:.0%}"
            )
        return messages


def check_logits(
    artifact: Artifact, texts: Texts, outputs: ArtifactOutputs, threshold: float, margin: float
) -> LogitsCheck:
    """Compare the logits with transformers."""
    actual = _logits(outputs)
    expected = {name: out.logits for name, out in texts.reference.items()}
    pairs = texts.rows(actual, expected)
    about = [
        rows._replace(actual=centred(rows.actual), expected=centred(rows.expected))
        for rows in pairs
    ]
    return LogitsCheck(
        nearness(about),
        parity([rows for rows in pairs if rows.low is None], margin),
        parity([_from(rows, rows.low) for rows in pairs if rows.low is not None], margin),
        list(_misplaced(artifact.head_shards, about, threshold)),
    )


def _misplaced(
    shards: Sequence[Shard], logits: Sequence[RowPairs], threshold: float
) -> Iterator[str]:
    """Messages about shards of the head that are in the place of another."""
    for shard in shards:
        alike = [other for other in shards if other.end - other.start == shard.end - shard.start]
        candidates = [
            [
                rows._replace(
                    actual=rows.actual[:, shard.start : shard.end],
                    expected=rows.expected[:, other.start : other.end],
                )
                for rows in logits
            ]
            for other in alike
        ]
        place = nearest(candidates)
        if alike[place] != shard and nearness(candidates[place]).cosine.median >= threshold:
            yield (
                f"{shard.path}: is for tokens {shard.start} to {shard.end - 1} and gives the "
                f"logits of {alike[place].start} to {alike[place].end - 1}"
            )


def _from(rows: RowPairs, first: int) -> RowPairs:
    return rows._replace(actual=rows.actual[first:], expected=rows.expected[first:])


def _logits(outputs: ArtifactOutputs) -> dict[str, Floats]:
    return {text: run.logits for text, run in outputs.items()}
