"""What is checked of an artifact, one function each: what was found, and the faults by name.

Knows what the artifact and the reference said (`walk`, `reference`), and how to compare numbers
(`compare`). Runs no model. The rule: a fault names the file, the output or the way of calling that
it is seen in first; what only follows from it is counted.
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
    Rows,
    centred,
    cosines,
    difference,
    nearest,
    nearness,
    parity,
)
from paceline.tools.coreml.golden.reference import Said
from paceline.tools.coreml.golden.run_shards import Answers, embedded, outputs_of
from paceline.tools.coreml.golden.texts import Text

Floats = npt.NDArray[np.float32]

BLOCK_COSINE = 0.999
"""Between a block and single tokens on a device, whose kernels may add in another order."""

REROUTED_PICKS = 0.9
"""The least share of equal picks, of those that are decided, in a model with experts."""

_ANGLE = 1e-3
"""Cosines and sines of a rotary table may differ by so much: about float16's own precision."""


class Texts(NamedTuple):
    """What was asked, and what transformers says of it, by a text's name."""

    asked: Sequence[Text]
    said: Mapping[str, Said]

    def rows(self, found: Mapping[str, Floats], expected: Mapping[str, Floats]) -> list[Rows]:
        """Both, text by text."""
        return [Rows(t.name, found[t.name], expected[t.name], t.low) for t in self.asked]


def check_same_model(artifact: Artifact, family: Family, checkpoint: Path) -> None:
    """Raise ModelError where the artifact cannot have been made of the checkpoint."""
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
            "the checkpoint that it was converted from"
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a way of calling agrees with blocks of all rows."""

    way: str
    difference: float
    """The largest, of any number."""
    cosine: float
    """The least, of any row of any output."""
    begins: str
    """The first output that differs; empty where none does."""

    def faults(self, *, exact: bool) -> list[str]:
        """What is not as it should be: `exact`, and it must be the same bits."""
        if self.difference == 0 or (not exact and self.cosine >= BLOCK_COSINE):
            return []
        return [
            f"{self.way}: {self.begins} is not what blocks say; the largest difference is "
            f"{self.difference:.3g}, the least cosine {self.cosine:.4f}"
        ]


def agreement(way: str, found: Answers, blocks: Answers) -> Agreement:
    """Compare what both have."""
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
    """Where the embeddings are not those of the checkpoint, [vocab, hidden_size], in float16."""
    found = np.load(artifact.folder / EMBEDDINGS, mmap_mode="r")
    if found.shape != expected.shape:
        return [f"{EMBEDDINGS}: has shape {list(found.shape)}, expected {list(expected.shape)}"]
    for at in range(0, len(found), _CHUNK):
        part = slice(at, at + _CHUNK)
        differing = (found[part] != expected[part].astype(np.float16)).any(axis=1)
        if differing.any():
            token = at + int(differing.argmax())
            return [f"{EMBEDDINGS}: is not the checkpoint's, from token {token} on"]
    return []


_CHUNK = 1 << 14
"""Embeddings that are looked at together."""


def rotary_faults(artifact: Artifact, family: Family) -> list[str]:
    """Where the rotary tables are not those of the checkpoint, for all positions there are."""
    found = np.load(artifact.folder / ROTARY)
    expected = np.stack(family.tables())
    if found.shape != expected.shape:
        return [f"{ROTARY}: has shape {list(found.shape)}, expected {list(expected.shape)}"]
    # Negated, so that a NaN counts.
    off = ~(np.abs(found - expected) <= _ANGLE)
    if not off.any():
        return []
    first = int(off.any(axis=(0, 2)).argmax())
    return [
        f"{ROTARY}: is not the checkpoint's from position {first} on, by up to "
        f"{np.abs(found - expected).max():.3g}"
    ]


@dataclass(frozen=True, slots=True)
class Seen:
    """A place where the artifact's hidden states are seen."""

    name: str
    layer: int | None
    """After which; None: before the first."""
    nearness: Nearness
    takes_for: int | None
    """Another place of the reference that it is nearer to, and near: a layer, -1 for embeddings."""

    def faults(self, threshold: float, *, experts: bool) -> list[str]:
        """What is not as it should be."""
        found = self.nearness.faults(threshold, experts=experts)
        if self.takes_for is not None:
            what = f"layer {self.takes_for}" if self.takes_for >= 0 else "the embeddings"
            found.append(f"it is what the reference has after {what}")
        return found


def look(artifact: Artifact, texts: Texts, answers: Answers, threshold: float) -> Iterator[Seen]:
    """The embeddings and every output of layers, beside transformers' own."""
    places: list[tuple[str, int | None, Mapping[str, Floats]]] = [
        (EMBEDDINGS, None, embedded(artifact, texts.asked))
    ]
    # What a family carries along behind the hidden state is nothing that transformers shows.
    places += [
        (
            str(output),
            output.layer,
            {
                text: each.outputs[output][:, : artifact.hidden_size]
                for text, each in answers.items()
            },
        )
        for output in outputs_of(artifact)
    ]
    for name, layer, found in places:
        own = 0 if layer is None else layer + 1
        candidates = [
            texts.rows(found, {text: said.streams[place] for text, said in texts.said.items()})
            for place in range(artifact.layers + 1)
        ]
        place = nearest(candidates)
        other = place != own and nearness(candidates[place]).cosine.median >= threshold
        yield Seen(name, layer, nearness(candidates[own]), place - 1 if other else None)


@dataclass(frozen=True, slots=True)
class Picks:
    """The logits and what is picked by them."""

    nearness: Nearness
    """Of logits about their mean: what all have in common picks nothing."""
    ordinary: Parity
    low_norm: Parity
    """Behind tokens of low norm; not judged."""
    misplaced: Sequence[str]
    """Shards of the head that give the logits of other tokens, in words."""

    def faults(self, threshold: float, margin: float, *, experts: bool) -> list[str]:
        """What is not as it should be."""
        near = self.nearness.faults(threshold, experts=experts)
        found = [*self.misplaced, *(f"logits: {each}" for each in near)]
        one = self.ordinary
        if one.worst <= margin:
            return found
        if not experts:
            found.append(
                f"picks: at {one.at} the reference rates the pick {one.worst:.3g} nats below its "
                f"own, expected {margin} at most"
            )
        elif one.decided_equal < REROUTED_PICKS * one.decided:
            found.append(
                f"picks: {one.decided_equal} of the {one.decided} that the reference decides by "
                f"more than {margin} nats are its own, expected {REROUTED_PICKS:.0%}"
            )
        return found


def picks(
    artifact: Artifact, texts: Texts, answers: Answers, threshold: float, margin: float
) -> Picks:
    """The logits beside transformers' own."""
    found, expected = _logits(answers), {name: said.logits for name, said in texts.said.items()}
    every = texts.rows(found, expected)
    about = [
        rows._replace(found=centred(rows.found), expected=centred(rows.expected)) for rows in every
    ]
    return Picks(
        nearness(about),
        parity([rows for rows in every if rows.low is None], margin),
        parity([_from(rows, rows.low) for rows in every if rows.low is not None], margin),
        list(_misplaced(artifact.head_shards, about, threshold)),
    )


def _misplaced(shards: Sequence[Shard], logits: Sequence[Rows], threshold: float) -> Iterator[str]:
    """Which shards of the head stand where another should."""
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
                f"{shard.path}: stands for tokens {shard.start} to {shard.end - 1} and gives the "
                f"logits of {alike[place].start} to {alike[place].end - 1}"
            )


def _from(rows: Rows, first: int) -> Rows:
    return rows._replace(found=rows.found[first:], expected=rows.expected[first:])


def _logits(answers: Answers) -> dict[str, Floats]:
    return {text: each.logits for text, each in answers.items()}
