"""The checks of an artifact, one function each: measurements and named faults.

Compares the outputs of `run_shards` and `reference` with the criteria of `compare`; runs no model.
Invariant: a fault names the first file, output or call mode that shows it; later ones are counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.engines.coreml.artifact import ROTARY, Artifact, Shard
from paceline.errors import ModelError
from paceline.storage.coreml import EMBEDDINGS
from paceline.tools.coreml.family import Family
from paceline.tools.coreml.golden.compare import (
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
from paceline.tools.coreml.golden.reference import ReferenceOutput
from paceline.tools.coreml.golden.run_shards import ArtifactOutputs, embed, outputs_of
from paceline.tools.coreml.golden.texts import Text

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

    def rows(self, found: Mapping[str, Floats], expected: Mapping[str, Floats]) -> list[RowPairs]:
        """Pairs of rows, text by text."""
        return [RowPairs(t.name, found[t.name], expected[t.name], t.low) for t in self.inputs]


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


def agreement(way: str, found: ArtifactOutputs, blocks: ArtifactOutputs) -> Agreement:
    """Compare the outputs that both have."""
    begins, largest, least = "", 0.0, 1.0
    common = list(next(iter(found.values())).outputs)
    pairs: list[tuple[str, Mapping[str, Floats], Mapping[str, Floats]]] = [
        (
            str(output),
            {text: each.outputs[output] for text, each in found.items()},
            {text: each.outputs[output] for text, each in blocks.items()},
        )
        for output in common
    ]
    pairs.append(("logits", _logits(found), _logits(blocks)))
    for name, ours, theirs in pairs:
        off = difference(ours, theirs)
        if off > 0:
            begins = begins or name
            largest = max(largest, off)
            least = min(least, *(cosines(ours[text], theirs[text]).min() for text in ours))
    return Agreement(way, largest, float(least), begins)


def embedding_faults(artifact: Artifact, expected: Floats) -> list[str]:
    """A fault if the embeddings differ from the checkpoint's, [vocab, hidden_size], in float16."""
    found = np.load(artifact.folder / EMBEDDINGS, mmap_mode="r")
    if found.shape != expected.shape:
        return [f"{EMBEDDINGS}: has shape {list(found.shape)}, expected {list(expected.shape)}"]
    for at in range(0, len(found), _CHUNK):
        part = slice(at, at + _CHUNK)
        differing = (found[part] != expected[part].astype(np.float16)).any(axis=1)
        if differing.any():
            token = at + int(differing.argmax())
            return [f"{EMBEDDINGS}: differs from the checkpoint's from token {token} on"]
    return []


_CHUNK = 1 << 14
"""Embeddings compared at once."""


def rotary_faults(artifact: Artifact, family: Family) -> list[str]:
    """A fault if the rotary tables differ from the checkpoint's at any position."""
    found = np.load(artifact.folder / ROTARY)
    expected = np.stack(family.rope_tables())
    if found.shape != expected.shape:
        return [f"{ROTARY}: has shape {list(found.shape)}, expected {list(expected.shape)}"]
    # Negated, so that a NaN counts.
    off = ~(np.abs(found - expected) <= _ANGLE)
    if not off.any():
        return []
    first = int(off.any(axis=(0, 2)).argmax())
    return [
        f"{ROTARY}: differs from the checkpoint's from position {first} on, by up to "
        f"{np.abs(found - expected).max():.3g}"
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
        found = self.nearness.faults(threshold, experts=experts)
        if self.takes_for is not None:
            what = f"layer {self.takes_for}" if self.takes_for >= 0 else "the embeddings"
            found.append(f"it matches the reference after {what}")
        return found


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
            {
                text: each.outputs[output][:, : artifact.hidden_size]
                for text, each in outputs.items()
            },
        )
        for output in outputs_of(artifact)
    ]
    for name, layer, found in places:
        own = 0 if layer is None else layer + 1
        candidates = [
            texts.rows(found, {text: out.streams[place] for text, out in texts.reference.items()})
            for place in range(artifact.layers + 1)
        ]
        place = nearest(candidates)
        other = place != own and nearness(candidates[place]).cosine.median >= threshold
        yield LayerCheck(name, layer, nearness(candidates[own]), place - 1 if other else None)


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
        found = [*self.misplaced, *(f"logits: {each}" for each in near)]
        one = self.ordinary
        if one.worst <= margin:
            return found
        if not experts:
            found.append(
                f"picks: at {one.at} the reference rates the top token {one.worst:.3g} nats below "
                f"its own, expected {margin} at most"
            )
        elif one.decided_equal < REROUTED_PICKS * one.decided:
            found.append(
                f"picks: {one.decided_equal} of the {one.decided} top tokens that the reference "
                f"decides by more than {margin} nats are equal, expected {REROUTED_PICKS:.0%}"
            )
        return found


def check_logits(
    artifact: Artifact, texts: Texts, outputs: ArtifactOutputs, threshold: float, margin: float
) -> LogitsCheck:
    """Compare the logits with transformers."""
    found = _logits(outputs)
    expected = {name: out.logits for name, out in texts.reference.items()}
    every = texts.rows(found, expected)
    about = [
        rows._replace(found=centred(rows.found), expected=centred(rows.expected)) for rows in every
    ]
    return LogitsCheck(
        nearness(about),
        parity([rows for rows in every if rows.low is None], margin),
        parity([_from(rows, rows.low) for rows in every if rows.low is not None], margin),
        list(_misplaced(artifact.head_shards, about, threshold)),
    )


def _misplaced(
    shards: Sequence[Shard], logits: Sequence[RowPairs], threshold: float
) -> Iterator[str]:
    """Messages about shards of the head that are in the place of another."""
    for shard in shards:
        alike = [one for one in shards if one.end - one.start == shard.end - shard.start]
        candidates = [
            [
                rows._replace(
                    found=rows.found[:, shard.start : shard.end],
                    expected=rows.expected[:, one.start : one.end],
                )
                for rows in logits
            ]
            for one in alike
        ]
        place = nearest(candidates)
        if alike[place] != shard and nearness(candidates[place]).cosine.median >= threshold:
            yield (
                f"{shard.path}: is for tokens {shard.start} to {shard.end - 1} and gives the "
                f"logits of {alike[place].start} to {alike[place].end - 1}"
            )


def _from(rows: RowPairs, first: int) -> RowPairs:
    return rows._replace(found=rows.found[first:], expected=rows.expected[first:])


def _logits(outputs: ArtifactOutputs) -> dict[str, Floats]:
    return {text: each.logits for text, each in outputs.items()}
