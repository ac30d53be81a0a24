"""What an artifact says of texts, in every way in which tokens can be given to it.

`walk` goes through it shard by shard, with calls of every number of rows: a shard is opened once,
taken through all texts, and closed, so that a model larger than memory can be looked at, and what
goes wrong is seen where it begins. `run_engine` gives the same texts to the engine itself. Knows
no torch, and nothing of what the numbers should be.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Block, tap_name
from paceline.engines.base import EngineSettings
from paceline.engines.coreml.artifact import ROTARY, Artifact, Shard
from paceline.engines.coreml.engine import CoreMlEngine
from paceline.engines.coreml.inputs import CallInputs
from paceline.engines.coreml.packages import Package, open_package
from paceline.models import Progress
from paceline.storage.coreml import EMBEDDINGS
from paceline.tools.coreml.golden.texts import Text

Floats = npt.NDArray[np.float32]


class Opening(NamedTuple):
    """How packages are opened; see `open_package`."""

    units: str
    rounding: str


class Output(NamedTuple):
    """An output of a shard of layers."""

    shard: str
    """The package's path in the artifact."""
    name: str
    layer: int
    """After which it comes out."""

    def __str__(self) -> str:
        return f"{self.name} of {self.shard}"


class Walked(NamedTuple):
    """What an artifact says of one text of T tokens."""

    outputs: Mapping[Output, Floats]
    """As shards come, [T, channels] each: `tap_N`, and `out_hidden`, the whole stream."""
    logits: Floats
    """[T, vocab]"""


Answers = Mapping[str, Walked]
"""By a text's name."""


def outputs_of(artifact: Artifact) -> list[Output]:
    """What comes out of the shards of layers, in the order of the layers."""
    return [
        Output(shard.path, name, layer)
        for shard in artifact.layer_shards
        for name, layer in (
            *((f"tap_{tap}", tap) for tap in sorted(shard.taps)),
            ("out_hidden", shard.end - 1),
        )
    ]


def widths_of(artifact: Artifact) -> list[int]:
    """Numbers of rows that a call can have, the engine's own first."""
    others = artifact.functions or range(1, artifact.rows)
    return [artifact.rows, *sorted(set(others) - {artifact.rows})]


def embedded(artifact: Artifact, texts: Sequence[Text]) -> dict[str, Floats]:
    """Each text's embeddings, [T, hidden_size], as the artifact has them."""
    embeddings = np.load(artifact.folder / EMBEDDINGS, mmap_mode="r")
    return {text.name: embeddings[list(text.tokens)].astype(np.float32) for text in texts}


def walk(
    artifact: Artifact, texts: Sequence[Text], opening: Opening, progress: Progress
) -> dict[int, dict[str, Walked]]:
    """The answers of calls with each number of rows, by that number.

    Every way of calling has states and hidden states of its own, from the first layer on.
    """
    cos, sin = np.load(artifact.folder / ROTARY)
    inputs = {
        width: CallInputs(width, cos, sin, conv_slots=artifact.conv_slots, lags=artifact.lags)
        for width in widths_of(artifact)
    }
    ways = [
        _Way(width, text.name, _stream(artifact, embeddings))
        for width in inputs
        for text, embeddings in zip(texts, embedded(artifact, texts).values(), strict=True)
    ]
    count = len(artifact.layer_shards) + len(artifact.head_shards)
    label = f"running {artifact.name} shard by shard"
    with progress.task(label, count, unit="packages") as reach:
        for done, shard in enumerate(artifact.layer_shards):
            for width, package in _opened(artifact, shard, list(inputs), opening):
                for way in ways:
                    if way.width == width:
                        way.take(_run(package, way.stream, width, inputs[width]), artifact, shard)
            reach(done + 1)
        for done, shard in enumerate(artifact.head_shards, start=len(artifact.layer_shards)):
            for width, package in _opened(artifact, shard, list(inputs), opening):
                for way in ways:
                    if way.width == width:
                        way.logits.append(_run(package, way.stream, width, None)["logits"])
            reach(done + 1)
    found: dict[int, dict[str, Walked]] = {width: {} for width in inputs}
    for way in ways:
        found[way.width][way.text] = Walked(way.outputs, np.concatenate(way.logits, axis=1))
    return found


class _Way:
    """A text on its way through the shards, in calls of so many rows."""

    def __init__(self, width: int, text: str, stream: Floats) -> None:
        self.width, self.text, self.stream = width, text, stream
        self.outputs: dict[Output, Floats] = {}
        self.logits: list[Floats] = []

    def take(self, found: Mapping[str, Floats], artifact: Artifact, shard: Shard) -> None:
        """What a shard of layers gave: its stream goes to the next."""
        self.stream = found["out_hidden"]
        self.outputs |= {
            output: found[output.name]
            for output in outputs_of(artifact)
            if output.shard == shard.path
        }


def _stream(artifact: Artifact, embeddings: Floats) -> Floats:
    """[T, stream_size]: embeddings, and zeros in what a family carries along besides."""
    stream = np.zeros((len(embeddings), artifact.stream_size), np.float32)
    stream[:, : artifact.hidden_size] = embeddings
    return stream


def _opened(
    artifact: Artifact, shard: Shard, widths: Sequence[int], opening: Opening
) -> Iterator[tuple[int, Package]]:
    """The package for each number of rows: one for all, unless it has static functions."""
    path = artifact.folder / shard.path
    package: Package | None = None
    for width in widths:
        if artifact.functions:
            package = _open(path, f"t{width}", opening)
        yield width, package or (package := _open(path, None, opening))


def _open(path: Path, function: str | None, opening: Opening) -> Package:
    return open_package(path, function=function, units=opening.units, rounding=opening.rounding)


def _run(
    package: Package, stream: Floats, width: int, inputs: CallInputs | None
) -> dict[str, Floats]:
    """A whole text through one package in calls of `width` rows, the last one filled up.

    `inputs` say where rows stand; None for a head, which does not care. Every output is [T, n].
    """
    state: Any = None if inputs is None else package.make_state()
    hidden = np.zeros((1, stream.shape[1], width, 1), np.float32)
    parts: dict[str, list[Floats]] = {}
    for at in range(0, len(stream), width):
        rows = stream[at : at + width]
        count = len(rows)
        hidden[0, :, :count, 0] = rows.T
        hidden[0, :, count:, 0] = 0
        about = {} if inputs is None else inputs.at(at, count)
        for name, found in package.predict({"hidden": hidden, **about}, state).items():
            parts.setdefault(name, []).append(found[0, :, :count, 0].T.copy())
    return {name: np.concatenate(found) for name, found in parts.items()}


WHOLE = "the engine, whole texts"
SINGLE = "the engine, single tokens"
REJECTED = "the engine, with rejected rows"


def run_engine(
    artifact: Artifact, texts: Sequence[Text], opening: Opening, progress: Progress
) -> dict[str, dict[str, Walked]]:
    """The answers of the engine to texts given whole, token by token, and with rows it rejects.

    Its calls always have the artifact's number of rows: a single token's is filled up. Of outputs
    it gives the taps.
    """
    settings = EngineSettings(cache_tokens=artifact.slots, taps=artifact.taps)
    engine = CoreMlEngine(artifact.folder, settings, units=opening.units, rounding=opening.rounding)
    ways = [WHOLE, SINGLE, *([REJECTED] if artifact.rows > 1 else [])]
    found: dict[str, dict[str, Walked]] = {way: {} for way in ways}
    with progress.task(
        f"the engine with {artifact.name}", len(ways) * len(texts), unit="texts"
    ) as reach:
        for done, (way, text) in enumerate((way, text) for way in ways for text in texts):
            found[way][text.name] = _through(engine, _blocks(way, text.tokens, artifact))
            reach(done + 1)
    return found


class _Given(NamedTuple):
    """A block for the engine, and how many of its rows are kept."""

    tokens: Sequence[int]
    kept: int


def _blocks(way: str, tokens: Sequence[int], artifact: Artifact) -> Iterator[_Given]:
    if way == WHOLE:
        yield _Given(tokens, len(tokens))
    elif way == SINGLE:
        yield from (_Given([token], 1) for token in tokens)
    else:
        at = number = 0
        while at < len(tokens):
            kept = min(1 + number % artifact.rows, len(tokens) - at)
            # Behind what is kept stand tokens that are not the text's: its own would come out right
            # even if what they left behind were read.
            wrong = [(token + 1) % artifact.vocab_size for token in tokens[: artifact.rows - kept]]
            yield _Given([*tokens[at : at + kept], *wrong], kept)
            at, number = at + kept, number + 1


def _through(engine: CoreMlEngine, blocks: Iterator[_Given]) -> Walked:
    with closing(engine.open()) as sequence:
        logits: list[Floats] = []
        taps: dict[int, list[Floats]] = {tap: [] for tap in engine.taps}
        for tokens, kept in blocks:
            result = engine.step([(sequence, Block(tokens, len(tokens)))])
            logits.append(result.logits[0][:kept].copy())
            for tap, rows in taps.items():
                rows.append(result.taps[0][tap_name(tap)][:kept])
            sequence.commit(kept)
    outputs = {
        output: np.concatenate(taps[output.layer])
        for output in outputs_of(engine.artifact)
        if output.name != "out_hidden"
    }
    return Walked(outputs, np.concatenate(logits))
