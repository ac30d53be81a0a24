"""Reads the manifest of a Core ML artifact and checks it against the files in its folder.

An artifact is a folder with shards (`.mlpackage`), embeddings, rotary tables, a tokenizer and
`manifest.json`. Invariant: the whole manifest is validated before anything is loaded, and the error
lists every fault.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from paceline.errors import ModelError
from paceline.storage.coreml import CORE_ML, EMBEDDINGS
from paceline.storage.files import read_json
from paceline.storage.manifest import (
    MANIFEST,
    FileRecord,
    changed_contents,
    check_files,
    is_checked,
)
from paceline.storage.validation import Count, Limit, Positive, list_faults, validated

KIND = CORE_ML
VERSION = 1
Task = Literal["causal-lm", "token-classification", "draft"]
CAUSAL_LM = "causal-lm"
"""The task of a model that predicts the next token."""
TOKEN_CLASSIFICATION = "token-classification"
"""The task of a model that labels the tokens of a whole text."""
DRAFT = "draft"
"""The task of a drafter, which fills blocks of `rows` rows."""
DECODE_ROWS = 8
"""Maximum rows of a decode pass. On the Neural Engine, 8 rows take as long as 3, because decoding
the weights takes most of the time (Anemll, docs/verifier_len.md, 2026-10); 64 rows take longer."""
MAX_STATES = 40
"""Most states per package that are known to run on a Neural Engine (seed experiments, M4 Max)."""
ROTARY = "rotary.npy"
"""[2, slots, r] float32: cosines and sines for every position."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A package with a part of the model, [start, end): layers, or tokens or labels of the head."""

    path: str
    """Path of the package in the artifact's folder."""
    start: Count
    end: Count
    taps: tuple[Count, ...] = ()
    """Layers whose hidden states are also outputs."""
    states: dict[str, tuple[Positive, ...]] = field(default_factory=dict)
    """Name of each state that is an input and output -> shape; see `packages.StatelessPackage`."""

    def output(self, layer: int) -> str:
        """Return the name of the output with the hidden state after a tapped layer, or the last.

        The last layer's output is the stream: with static rows, coremltools would give a copy the
        name of the stream, and leave the stream without a name.
        """
        return "out_hidden" if layer == self.end - 1 else f"tap_{layer}"


@dataclass(frozen=True, slots=True)
class Drafts:
    """A drafter's inputs from its target; the artifact has the target's sizes."""

    taps: Annotated[tuple[Count, ...], Limit(min_length=1)]
    """Layers of the target, from 0, whose hidden states are tapped."""
    mask_token: Count
    target_layers: Positive


@dataclass(frozen=True, slots=True)
class Artifact:
    """A validated manifest; all fields except `folder` are its keys."""

    name: str
    family: str
    task: Task
    labels: tuple[str, ...]
    """A classifier's labels; empty for other tasks."""
    reach: Count
    """For a classifier: tokens that rows attend to on either side; 0 for other tasks."""
    layers: Positive
    hidden_size: Positive
    stream_size: Positive
    """Channels between shards; the first `hidden_size` are the hidden state."""
    vocab_size: Positive
    slots: Positive
    rows: Positive
    """Maximum rows of a forward pass; prefill uses this number."""
    functions: tuple[Positive, ...]
    """Numbers of rows with a static function; empty: any number up to `rows`."""
    ring: Count
    """Size of the ring buffer with a convolution's recent rows."""
    lags: Count
    """Earlier rows that a convolution reads."""
    layer_shards: Annotated[tuple[Shard, ...], Limit(min_length=1)]
    head_shards: Annotated[tuple[Shard, ...], Limit(min_length=1)]
    fingerprint: str
    """SHA-256 of the contents of all files, in hex."""
    files: dict[str, FileRecord]
    drafts: Drafts | None = None
    """For the task `DRAFT`."""
    folder: Path = Path()

    @property
    def widths(self) -> tuple[int, ...]:
        """All possible numbers of rows in a forward pass, ascending."""
        return tuple(sorted(self.functions or range(1, self.rows + 1)))

    @property
    def decode_rows(self) -> int:
        """Rows of decode passes: the largest width up to `DECODE_ROWS`, or else the smallest."""
        return max((n for n in self.widths if n <= DECODE_ROWS), default=self.widths[0])

    def function(self, rows: int) -> str | None:
        """Return the function's name for `rows` rows, or None if packages have only one."""
        return f"t{rows}" if len(self.functions) > 1 else None

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(tap for shard in self.layer_shards for tap in shard.taps)


def read_artifact(folder: Path) -> Artifact:
    """Read the artifact in `folder`, and check the size and checksum of every file.

    Raises ModelError if it is not an artifact, or corrupt; the message lists every fault.
    """
    path = folder / MANIFEST
    value = read_json(path)
    if value.get("kind") != KIND or value.get("version") != VERSION:
        raise ModelError(
            f"{folder} has kind {value.get('kind')} and version {value.get('version')}; expected "
            f"{KIND} and version {VERSION}"
        )
    artifact = replace(validated(Artifact, value, str(path), error=ModelError), folder=folder)
    faults = [*_contradictions(artifact)]
    if not faults:
        check_files(folder, artifact.files, required=(EMBEDDINGS, ROTARY))
        if not is_checked(folder, artifact.files):
            faults = changed_contents(folder, artifact.files)
    if faults:
        hint = "convert the model again, or copy it again"
        raise ModelError(f"{list_faults(str(path), faults)}; {hint}")
    return artifact


def _contradictions(artifact: Artifact) -> Iterator[str]:
    if artifact.functions and artifact.rows != artifact.widths[-1]:
        yield (
            f"functions is {list(artifact.functions)}, expected one for {artifact.rows} rows as "
            "the largest"
        )
    if artifact.lags and artifact.ring < artifact.rows + artifact.lags:
        yield f"ring is {artifact.ring}, expected at least {artifact.rows + artifact.lags}"
    if (artifact.drafts is None) == (artifact.task == DRAFT):
        yield f"drafts is {artifact.drafts}, which does not match the task {artifact.task}"
    if artifact.task != TOKEN_CLASSIFICATION:
        if artifact.labels:
            count = len(artifact.labels)
            yield f"it has {count} labels, expected none for the task {artifact.task}"
        yield from _shard_faults(artifact, artifact.head_shards, artifact.vocab_size, "token")
    else:
        yield from _classifier_faults(artifact)
        yield from _shard_faults(artifact, artifact.head_shards, len(artifact.labels), "label")
    yield from _shard_faults(artifact, artifact.layer_shards, artifact.layers, "layer")


def _classifier_faults(artifact: Artifact) -> Iterator[str]:
    task, rows = f"for the task {artifact.task}", artifact.rows
    if not artifact.labels or len({*artifact.labels}) < len(artifact.labels):
        yield f"labels is {[*artifact.labels]}, expected at least one, without duplicates"
    if not artifact.reach:
        yield f"reach is 0, expected at least 1 {task}"
    if not artifact.functions:
        yield f"functions is empty, expected one for {rows} rows {task}"
    if len(artifact.head_shards) > 1:
        yield f"it has {len(artifact.head_shards)} head_shards, expected one {task}"
    if artifact.slots < rows:
        yield f"slots is {artifact.slots}, expected at least the {rows} rows of a pass {task}"


def _shard_faults(
    artifact: Artifact, shards: Sequence[Shard], whole: int, what: str
) -> Iterator[str]:
    """Yield faults of shards, which must cover [0, whole) in order, without gaps or overlaps."""
    reached = 0
    for shard in shards:
        path, start, end = shard.path, shard.start, shard.end
        if start != reached or end <= start:
            yield f"{path} has {what}s {start} to {end - 1}, expected a range from {reached}"
        reached = end
        if any(not start <= tap < end for tap in shard.taps):
            taps = list(shard.taps)
            yield f"{path} has taps {taps}, expected layers from {start} to {end - 1}"
        if not any(name.startswith(f"{path}/") for name in artifact.files):
            yield f"the files of {path} are not listed"
    if reached != whole:
        yield f"the last shard ends at {what} {reached}, expected {whole}"
