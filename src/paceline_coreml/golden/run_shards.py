"""Runs texts through an artifact in every mode, and collects its outputs.

`run_shards` goes shard by shard, with every number of rows: it opens a shard once, runs all texts,
and closes it. A model may thus be larger than memory, and faults appear in the shard that causes
them. `run_engine` runs the same texts in the engine, and `run_classifier` in a token classifier.
This file does not import torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Block, tap_name
from paceline.engines.base import EngineSettings
from paceline.models import Progress
from paceline.storage.coreml import EMBEDDINGS
from paceline_coreml.engine.artifact import ROTARY, Artifact, Shard
from paceline_coreml.engine.call import run_package
from paceline_coreml.engine.classifier import TextClassifier
from paceline_coreml.engine.engine import CoreMlEngine
from paceline_coreml.engine.inputs import CallInputs
from paceline_coreml.engine.packages import DEFAULT_UNITS, Package, PackageOpener
from paceline_coreml.golden.texts import Text

Floats = npt.NDArray[np.float32]


class LayerOutput(NamedTuple):
    shard: str
    """The package's path in the artifact."""
    name: str
    """`tap_N`, or the stream `out_hidden`."""
    layer: int
    """The layer with this output."""

    def __str__(self) -> str:
        return f"{self.name} of {self.shard}"


LOGITS = "logits"

ArtifactOutput = Mapping[str, Floats]
"""An artifact's outputs for the n rows of all texts, concatenated.

Each `LayerOutput` as text -> [n, channels], in the order of shards; `LOGITS` last, [n, vocab]."""


def outputs_of(artifact: Artifact) -> list[LayerOutput]:
    return [
        LayerOutput(shard.path, shard.output(layer), layer)
        for shard in artifact.layer_shards
        for layer in sorted({*shard.taps, shard.end - 1})
    ]


def call_widths(artifact: Artifact) -> list[int]:
    """Return the engine's numbers of rows per pass, decode first, and some others."""
    first = artifact.decode_rows
    others = artifact.functions or (*range(1, first), artifact.rows)
    return [first, *sorted({*others} - {first})]


def embed(artifact: Artifact, text: Text) -> Floats:
    """Return a text's embeddings from the artifact, [T, hidden_size]."""
    embeddings = np.load(artifact.folder / EMBEDDINGS, mmap_mode="r")
    rows: Floats = embeddings[list(text.tokens)].astype(np.float32)
    return rows


def run_shards(
    artifact: Artifact,
    texts: Sequence[Text],
    rounding: str,
    progress: Progress,
    *,
    widths: Sequence[int] = (),
) -> dict[int, ArtifactOutput]:
    """Return outputs by the number of rows per pass, for `widths` or all.

    Every number of rows has its own states and hidden states, starting at the first layer.
    """
    tables, widths = np.load(artifact.folder / ROTARY), widths or call_widths(artifact)
    inputs = {
        width: CallInputs(width, *tables, conv_slots=artifact.ring, lags=artifact.lags)
        for width in widths
    }
    streams = {width: [_stream(artifact, text) for text in texts] for width in widths}
    outputs: dict[int, dict[str, Floats]] = {width: {} for width in widths}
    logits: dict[int, list[Floats]] = {width: [] for width in widths}
    opener = PackageOpener(
        artifact, units=DEFAULT_UNITS, rounding=rounding, on_message=progress.note
    )
    shards = (*artifact.layer_shards, *artifact.head_shards)
    label = f"running {artifact.name} shard by shard"
    with progress.task(label, len(shards), unit="packages") as reach:
        for done, shard in enumerate(shards, start=1):
            is_head = done > len(artifact.layer_shards)
            for width, package in _packages(opener, artifact, shard, widths):
                rows = None if is_head else inputs[width]
                runs = [run_package(package, stream, width, rows) for stream in streams[width]]
                if is_head:
                    logits[width].append(np.concatenate([run[LOGITS] for run in runs]))
                    continue
                streams[width] = [run["out_hidden"] for run in runs]
                for output in outputs_of(artifact):
                    if output.shard == shard.path:
                        joined = np.concatenate([run[output.name] for run in runs])
                        outputs[width][str(output)] = joined
            reach(done)
    return {
        width: {**outputs[width], LOGITS: np.concatenate(logits[width], axis=1)} for width in widths
    }


def _stream(artifact: Artifact, text: Text) -> Floats:
    """Return [T, stream_size]: embeddings, then zeros in the family's extra channels."""
    stream = np.zeros((len(text.tokens), artifact.stream_size), np.float32)
    stream[:, : artifact.hidden_size] = embed(artifact, text)
    return stream


def _packages(
    opener: PackageOpener, artifact: Artifact, shard: Shard, widths: Sequence[int]
) -> Iterator[tuple[int, Package]]:
    """Yield the package for each number of rows: the same one, unless it has static functions."""
    package: Package | None = None
    for width in widths:
        if package is None or artifact.function(width) is not None:
            package = opener.open(shard.path, artifact.function(width))
        yield width, package


PROMPT = "the engine, a prompt"
WHOLE = "the engine, whole texts"
SINGLE = "the engine, single tokens"
REJECTED = "the engine, with rejected rows"


def run_engine(
    artifact: Artifact, texts: Sequence[Text], rounding: str, progress: Progress
) -> dict[str, ArtifactOutput]:
    """Return the engine's outputs for whole texts, single tokens, and with rejected rows.

    A pass always has its role's number of rows, so single tokens are padded. If prefill has another
    number of rows, the text also runs as a prompt. The layer outputs are the taps.
    """
    settings = EngineSettings(cache_tokens=artifact.slots, taps=artifact.taps)
    engine = CoreMlEngine(artifact.folder, settings, rounding=rounding)
    modes = [WHOLE, SINGLE, *([REJECTED] if artifact.decode_rows > 1 else [])]
    modes += [PROMPT] if artifact.rows > artifact.decode_rows else []
    outputs: dict[str, ArtifactOutput] = {}
    label = f"the engine with {artifact.name}"
    with progress.task(label, len(modes), unit="modes") as reach:
        for done, mode in enumerate(modes, start=1):
            runs = [
                _through(engine, _blocks(mode, text.tokens, artifact), prompt=mode == PROMPT)
                for text in texts
            ]
            outputs[mode] = {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}
            reach(done)
    return outputs


def run_classifier(
    artifact: Artifact, texts: Sequence[Text], rounding: str, progress: Progress
) -> tuple[ArtifactOutput, dict[str, ArtifactOutput]]:
    """Return scores of texts one by one, and by mode of all texts in as few passes as possible."""
    tokens = [text.tokens for text in texts]
    with progress.task(f"classifying with {artifact.name}"):
        model = TextClassifier(artifact.folder, rounding=rounding)
        alone = [model.label([text])[0].scores for text in tokens]
        packed = [one.scores for one in model.label(tokens)]
    return {LOGITS: np.concatenate(alone)}, {"texts packed": {LOGITS: np.concatenate(packed)}}


_Blocks = Iterator[tuple[Sequence[int], int]]
"""Blocks for the engine, and their numbers of accepted rows."""


def _blocks(mode: str, tokens: Sequence[int], artifact: Artifact) -> _Blocks:
    rows = artifact.decode_rows
    if mode in (WHOLE, PROMPT):
        yield tokens, len(tokens)
    elif mode == SINGLE:
        yield from (([token], 1) for token in tokens)
    else:
        at = number = 0
        while at < len(tokens):
            kept = min(1 + number % rows, len(tokens) - at)
            # Rejected tokens differ from the text's tokens, which would be correct even if their KV
            # were read.
            wrong = [(token + 1) % artifact.vocab_size for token in tokens[: rows - kept]]
            yield [*tokens[at : at + kept], *wrong], kept
            at, number = at + kept, number + 1


def _through(engine: CoreMlEngine, blocks: _Blocks, *, prompt: bool) -> ArtifactOutput:
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
        str(output): np.concatenate(taps[output.layer])
        for output in outputs_of(engine.artifact)
        if output.name != "out_hidden"
    }
    return {**outputs, LOGITS: np.concatenate(logits)}
