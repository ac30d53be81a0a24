"""Runs texts through an artifact in every call mode, and collects its outputs.

`run_shards` goes shard by shard, with calls of every number of rows: a shard is opened once, runs
all texts, and is closed, so a model may be larger than memory, and a fault shows in the shard that
causes it. `run_engine` runs the same texts in the engine. Independent of torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Block, tap_name
from paceline.engines.base import EngineSettings
from paceline.models import Progress
from paceline.storage.coreml import EMBEDDINGS
from paceline_coreml.engine.artifact import ROTARY, Artifact, Shard
from paceline_coreml.engine.engine import CoreMlEngine
from paceline_coreml.engine.inputs import CallInputs
from paceline_coreml.engine.packages import Package, PackageOpener
from paceline_coreml.golden.texts import Text

Floats = npt.NDArray[np.float32]


class PackageOptions(NamedTuple):
    """Options of a `PackageOpener`."""

    units: str
    rounding: str


class LayerOutput(NamedTuple):
    """An output of a shard of layers."""

    shard: str
    """The package's path in the artifact."""
    name: str
    layer: int
    """The layer that it is the output of."""

    def __str__(self) -> str:
        return f"{self.name} of {self.shard}"


class ArtifactOutput(NamedTuple):
    """Outputs of an artifact for one text of T tokens."""

    outputs: Mapping[LayerOutput, Floats]
    """In the order of shards, [T, channels]: `tap_N`, and the stream `out_hidden`."""
    logits: Floats
    """[T, vocab]"""


ArtifactOutputs = Mapping[str, ArtifactOutput]
"""By the text's name."""


def outputs_of(artifact: Artifact) -> list[LayerOutput]:
    """Outputs of the shards of layers, in the order of the layers."""
    return [
        LayerOutput(shard.path, shard.output(layer), layer)
        for shard in artifact.layer_shards
        for layer in sorted({*shard.taps, shard.end - 1})
    ]


def call_widths(artifact: Artifact) -> list[int]:
    """Numbers of rows of the engine's calls, those in decode first, and of some others."""
    first = artifact.decode_rows
    others = artifact.functions or (*range(1, first), artifact.rows)
    return [first, *sorted({*others} - {first})]


def embed(artifact: Artifact, texts: Sequence[Text]) -> dict[str, Floats]:
    """Each text's embeddings from the artifact, [T, hidden_size]."""
    embeddings = np.load(artifact.folder / EMBEDDINGS, mmap_mode="r")
    return {text.name: embeddings[list(text.tokens)].astype(np.float32) for text in texts}


def run_shards(
    artifact: Artifact, texts: Sequence[Text], options: PackageOptions, progress: Progress
) -> dict[int, dict[str, ArtifactOutput]]:
    """Outputs of calls by their number of rows.

    Every number of rows has its own states and hidden states, from the first layer on.
    """
    cos, sin = np.load(artifact.folder / ROTARY)
    inputs = {
        width: CallInputs(width, cos, sin, conv_slots=artifact.conv_slots, lags=artifact.lags)
        for width in call_widths(artifact)
    }
    runs = [
        _Run(width, text.name, _stream(artifact, embeddings))
        for width in inputs
        for text, embeddings in zip(texts, embed(artifact, texts).values(), strict=True)
    ]
    opener = PackageOpener(
        artifact, units=options.units, rounding=options.rounding, say=progress.say
    )
    count = len(artifact.layer_shards) + len(artifact.head_shards)
    label = f"running {artifact.name} shard by shard"
    with progress.task(label, count, unit="packages") as reach:
        for done, shard in enumerate(artifact.layer_shards):
            for width, package in _packages(opener, artifact, shard, list(inputs)):
                for run in runs:
                    if run.width == width:
                        run.add(_run(package, run.stream, width, inputs[width]), artifact, shard)
            reach(done + 1)
        for done, shard in enumerate(artifact.head_shards, start=len(artifact.layer_shards)):
            for width, package in _packages(opener, artifact, shard, list(inputs)):
                for run in runs:
                    if run.width == width:
                        run.logits.append(_run(package, run.stream, width, None)["logits"])
            reach(done + 1)
    outputs: dict[int, dict[str, ArtifactOutput]] = {width: {} for width in inputs}
    for run in runs:
        outputs[run.width][run.text] = ArtifactOutput(
            run.outputs, np.concatenate(run.logits, axis=1)
        )
    return outputs


class _Run:
    """A text in the middle of the shards, in calls of `width` rows."""

    def __init__(self, width: int, text: str, stream: Floats) -> None:
        self.width, self.text, self.stream = width, text, stream
        self.outputs: dict[LayerOutput, Floats] = {}
        self.logits: list[Floats] = []

    def add(self, outputs: Mapping[str, Floats], artifact: Artifact, shard: Shard) -> None:
        """Add the outputs of a shard of layers; its stream is the next shard's input."""
        self.stream = outputs["out_hidden"]
        self.outputs |= {
            output: outputs[output.name]
            for output in outputs_of(artifact)
            if output.shard == shard.path
        }


def _stream(artifact: Artifact, embeddings: Floats) -> Floats:
    """[T, stream_size]: embeddings, then zeros in the family's extra channels."""
    stream = np.zeros((len(embeddings), artifact.stream_size), np.float32)
    stream[:, : artifact.hidden_size] = embeddings
    return stream


def _packages(
    opener: PackageOpener, artifact: Artifact, shard: Shard, widths: Sequence[int]
) -> Iterator[tuple[int, Package]]:
    """The package per number of rows: one for all, unless it has static functions."""
    package: Package | None = None
    for width in widths:
        if package is None or artifact.function(width) is not None:
            package = opener.open(shard.path, artifact.function(width))
        yield width, package


def _run(
    package: Package, stream: Floats, width: int, inputs: CallInputs | None
) -> dict[str, Floats]:
    """Run a whole text through one package in calls of `width` rows, the last one padded.

    `inputs` has the rows' positions; None for a head. Every output is [T, n].
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
        for name, tensor in package.predict({"hidden": hidden, **about}, state).items():
            parts.setdefault(name, []).append(tensor[0, :, :count, 0].T.copy())
    return {name: np.concatenate(blocks) for name, blocks in parts.items()}


PROMPT = "the engine, a prompt"
WHOLE = "the engine, whole texts"
SINGLE = "the engine, single tokens"
REJECTED = "the engine, with rejected rows"


def run_engine(
    artifact: Artifact, texts: Sequence[Text], options: PackageOptions, progress: Progress
) -> dict[str, dict[str, ArtifactOutput]]:
    """Outputs of the engine for whole texts, for single tokens, and with rejected rows.

    A call always has its role's number of rows, so a single token is padded. If prompts have calls
    of other rows, outputs for a prompt as well. The layer outputs are the taps.
    """
    settings = EngineSettings(cache_tokens=artifact.slots, taps=artifact.taps)
    engine = CoreMlEngine(artifact.folder, settings, units=options.units, rounding=options.rounding)
    modes = [WHOLE, SINGLE, *([REJECTED] if artifact.decode_rows > 1 else [])]
    modes += [PROMPT] if artifact.rows > artifact.decode_rows else []
    outputs: dict[str, dict[str, ArtifactOutput]] = {mode: {} for mode in modes}
    with progress.task(
        f"the engine with {artifact.name}", len(modes) * len(texts), unit="texts"
    ) as reach:
        for done, (mode, text) in enumerate((mode, text) for mode in modes for text in texts):
            outputs[mode][text.name] = _through(
                engine, _blocks(mode, text.tokens, artifact), prompt=mode == PROMPT
            )
            reach(done + 1)
    return outputs


class _Block(NamedTuple):
    """A block for the engine and its number of accepted rows."""

    tokens: Sequence[int]
    kept: int


def _blocks(mode: str, tokens: Sequence[int], artifact: Artifact) -> Iterator[_Block]:
    rows = artifact.decode_rows
    if mode in (WHOLE, PROMPT):
        yield _Block(tokens, len(tokens))
    elif mode == SINGLE:
        yield from (_Block([token], 1) for token in tokens)
    else:
        at = number = 0
        while at < len(tokens):
            kept = min(1 + number % rows, len(tokens) - at)
            # The rejected tokens differ from the text's: those would be right even if their KV
            # were read.
            wrong = [(token + 1) % artifact.vocab_size for token in tokens[: rows - kept]]
            yield _Block([*tokens[at : at + kept], *wrong], kept)
            at, number = at + kept, number + 1


def _through(engine: CoreMlEngine, blocks: Iterator[_Block], *, prompt: bool) -> ArtifactOutput:
    with closing(engine.open()) as sequence:
        logits: list[Floats] = []
        taps: dict[int, list[Floats]] = {tap: [] for tap in engine.taps}
        for tokens, kept in blocks:
            result = engine.step([(sequence, Block(tokens, len(tokens), prefill=prompt))])
            logits.append(result.logits[0][:kept].copy())
            for tap, rows in taps.items():
                rows.append(result.taps[0][tap_name(tap)][:kept])
            sequence.commit(kept)
    outputs = {
        output: np.concatenate(taps[output.layer])
        for output in outputs_of(engine.artifact)
        if output.name != "out_hidden"
    }
    return ArtifactOutput(outputs, np.concatenate(logits))
