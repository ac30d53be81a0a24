"""Multiply-accumulates and weight bytes of an artifact's calls, by part of the model and by rows.

Runs shards in the rehearsal, on any machine, and measures no time. Counts the work of the whole
graph, in which every expert of a mixture is computed for every row and most are multiplied by 0;
and also the work without the experts that no row uses.

Counts matrix products, and weights as stored. It leaves out KV caches and other states: a call
reads them once whatever its rows, and they are small compared with the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidRequest
from paceline.storage.coreml import EMBEDDINGS
from paceline_coreml.engine.artifact import CAUSAL_LM, ROTARY, Artifact, Shard
from paceline_coreml.engine.inputs import CallInputs
from paceline_coreml.engine.packages import state_input, state_output
from paceline_coreml.engine.parts import EXPERTS, PARTS, trace
from paceline_coreml.rehearsal.model import RehearsalState
from paceline_coreml.rehearsal.plan import make_plan
from paceline_coreml.rehearsal.program import Package, read_package

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

_ROUNDING = "f32"
"""No rounding: a small routing weight must not become 0."""


class PartWork(NamedTuple):
    """Work of a part of the model in one call."""

    macs: int
    """Multiply-accumulates."""
    weight_bytes: int
    """Bytes of weights, read once."""


Parts = Mapping[str, PartWork]
"""Part -> its work, for those of `parts.PARTS` that the model has."""


class CallWork(NamedTuple):
    """Work of one call."""

    parts: Parts
    has: Bools
    """[layers with experts, rows, experts]: True if the row's routing weight is not 0."""


class Work(NamedTuple):
    """Work of calls, by number of rows."""

    whole: Mapping[int, Parts]
    """Work of the whole graph: all experts, for all rows."""
    chosen: Mapping[int, Parts]
    """Work with experts computed only for the rows that use them, and read if any row does.

    A mean over consecutive rows. Empty for a model without experts."""


def total(parts: Parts) -> PartWork:
    """Sum over all parts."""
    return PartWork(
        sum(part.macs for part in parts.values()), sum(part.weight_bytes for part in parts.values())
    )


def work_of(artifact: Artifact) -> Work:
    """Work of calls of one row and of the most rows in decode, as far as the artifact allows them.

    Experts are routed for a few tokens spread over the vocabulary.

    Raises:
        ModelError: a shard cannot be rehearsed.
        InvalidRequest: the artifact has too few slots, or is no language model.
    """
    rows = sorted({1, artifact.decode_rows} & {*artifact.widths})
    tokens = np.linspace(0, artifact.vocab_size - 1, sum(rows), dtype=int).tolist()
    ends = np.cumsum([0, *rows]).tolist()
    calls = count(artifact, [tokens[start:end] for start, end in pairwise(ends)])
    has = np.concatenate([call.has for call in calls], axis=1)
    whole = {n: call.parts for n, call in zip(rows, calls, strict=True)}
    return Work(whole, {n: only_chosen(whole[n], has, n) for n in rows if has.size})


def only_chosen(parts: Parts, has: Bools, rows: int) -> Parts:
    """Work of a call of `rows` rows with experts computed only for the rows that use them.

    Args:
        parts: work of such a call with all experts.
        has: [layers, N, experts]: whether a row of a text uses an expert; N at least `rows`.
        rows: T.
    """
    experts = parts[EXPERTS]
    macs = round(experts.macs * float(has.mean()))
    read = round(experts.weight_bytes * experts_read(has, rows) / has.shape[2])
    return {**parts, EXPERTS: PartWork(macs, read)}


def experts_read(has: Bools, rows: int) -> float:
    """Experts of a layer that any of `rows` consecutive rows uses: a mean over rows and layers.

    `has` is [layers, N, experts].
    """
    calls = np.lib.stride_tricks.sliding_window_view(has, rows, axis=1)
    return float(calls.any(-1).sum(2).mean())


def count(artifact: Artifact, blocks: Sequence[Sequence[int]]) -> list[CallWork]:
    """Run a text in one call per block; returns the work per call.

    One shard at a time is in memory.

    Raises:
        ModelError: a shard cannot be rehearsed.
        InvalidRequest: the artifact is no language model, has too few slots for the text, or has no
            function for the rows of a block.
    """
    _check(artifact, [len(block) for block in blocks])
    text = _Text(artifact, blocks)
    tallies = [_Tally() for _ in blocks]
    for shard in artifact.layer_shards:
        run = _Shard(artifact, shard, {len(block) for block in blocks})
        for call, tally in enumerate(tallies):
            text.streams[call] = run(text.inputs(call), tally)["out_hidden"]
    for shard in artifact.head_shards:
        run = _Shard(artifact, shard, {len(block) for block in blocks})
        for stream, tally in zip(text.streams, tallies, strict=True):
            run({"hidden": stream}, tally)
    return [tally.call() for tally in tallies]


def _check(artifact: Artifact, rows: Sequence[int]) -> None:
    if artifact.task != CAUSAL_LM:
        raise InvalidRequest(
            f"{artifact.folder} is for {artifact.task}; work is counted for language models only"
        )
    if sum(rows) > artifact.slots:
        raise InvalidRequest(
            f"a text of {sum(rows)} tokens does not fit into the {artifact.slots} slots of "
            f"{artifact.folder}; convert it with more"
        )
    taken = artifact.widths
    if wrong := sorted(set(rows) - set(taken)):
        raise InvalidRequest(
            f"{artifact.folder} takes no calls of {', '.join(map(str, wrong))} rows; expected "
            f"{', '.join(map(str, taken))}"
        )


class _Text:
    """A text on its way through the shards, split into calls."""

    def __init__(self, artifact: Artifact, blocks: Sequence[Sequence[int]]) -> None:
        cos, sin = np.load(artifact.folder / ROTARY)
        embeddings = np.load(artifact.folder / EMBEDDINGS, mmap_mode="r")
        widths = {len(block) for block in blocks}
        self._rows = {
            width: CallInputs(width, cos, sin, conv_slots=artifact.conv_slots, lags=artifact.lags)
            for width in widths
        }
        self._lengths = [len(block) for block in blocks]
        self._starts = np.cumsum([0, *self._lengths]).tolist()
        self.streams: list[Floats] = []
        """Per call the output of the last shard, [1, stream_size, rows, 1]."""
        for block in blocks:
            stream = np.zeros((1, artifact.stream_size, len(block), 1), np.float32)
            stream[0, : artifact.hidden_size, :, 0] = embeddings[list(block)].T
            self.streams.append(stream)

    def inputs(self, call: int) -> dict[str, Floats]:
        """Inputs of a shard of layers; valid until the next call of this method."""
        rows = self._lengths[call]
        return {"hidden": self.streams[call], **self._rows[rows].at(self._starts[call], rows)}


class _Shard:
    """A shard that counts its work and records which experts the rows use."""

    def __init__(self, artifact: Artifact, shard: Shard, widths: set[int]) -> None:
        package = read_package(artifact.folder / shard.path)
        names = {width: artifact.function(width) for width in widths}
        opened = {name: _Opened(package, name) for name in set(names.values())}
        self._opened = {width: opened[name] for width, name in names.items()}
        # Functions of a package share their states.
        states = next(iter(opened.values())).states
        self._cells = RehearsalState(None, states, _ROUNDING).cells
        self._outside = {name: np.zeros(shape, np.float32) for name, shape in shard.states.items()}

    def __call__(self, data: Mapping[str, Floats], tally: "_Tally") -> Mapping[str, Any]:
        """Run the next rows; outputs by name."""
        outside = {state_input(name): value for name, value in self._outside.items()}
        opened = self._opened[data["hidden"].shape[2]]
        values = opened.run({**self._cells, **outside, **data}, tally)
        self._outside = {name: values[state_output(name)] for name in self._outside}
        return values


class _Opened:
    """A function of a package, ready to run."""

    def __init__(self, package: Package, name: str | None) -> None:
        function = package.function(name)
        self.states = function.states
        self._traced = trace(function.block)
        # Recorded values must outlive their last use.
        watched = [value for values in self._traced.shares.values() for value in values]
        block = replace(function.block, outputs=(*function.block.outputs, *watched))
        self._plan = make_plan(package, replace(function, block=block), _ROUNDING)

    def run(self, inputs: Mapping[str, Any], tally: "_Tally") -> Mapping[str, Any]:
        values: dict[str, Any] = {**self._plan.constants, **inputs}
        with np.errstate(all="ignore"):
            for step in self._plan.steps:
                macs = step.run(values)
                tally.add(self._traced.parts[step.op.name], macs, step.weight_bytes)
        for names in self._traced.shares.values():
            shares = np.concatenate([values[name] for name in names], axis=1)
            tally.has.append(shares[0, :, 0].T != 0)
        return values


class _Tally:
    """Work of a call so far."""

    def __init__(self) -> None:
        self._parts = dict.fromkeys(PARTS, PartWork(0, 0))
        self.has: list[Bools] = []

    def add(self, part: str, macs: int, weight_bytes: int) -> None:
        macs_before, bytes_before = self._parts[part]
        self._parts[part] = PartWork(macs_before + macs, bytes_before + weight_bytes)

    def call(self) -> CallWork:
        parts = {part: work for part, work in self._parts.items() if any(work)}
        return CallWork(parts, np.array(self.has) if self.has else np.zeros((0, 0, 0), np.bool_))
