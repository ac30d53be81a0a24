"""Reads the manifest of a Core ML artifact and checks it against the files in its folder.

An artifact is a folder with shards (`.mlpackage`), embeddings, rotary tables, a tokenizer and
`manifest.json`. Invariant: the whole manifest is validated before anything is loaded, and the error
names every fault.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ModelError
from paceline.storage.coreml import CORE_ML, EMBEDDINGS
from paceline.storage.files import read_json, sha256_of
from paceline.storage.manifest import MANIFEST

KIND = CORE_ML
VERSION = 1
CAUSAL_LM = "causal-lm"
"""Task of a model that predicts the next token."""
TOKEN_CLASSIFICATION = "token-classification"
"""Task of a model that gives each token of a whole text one of its labels."""
ROTARY = "rotary.npy"
"""[2, slots, r] float32: cosines and sines of every position."""


class Shard(NamedTuple):
    """A package with a part of the model, [start, end): layers, or tokens or labels of the head."""

    path: str
    """Path of the package in the artifact's folder."""
    start: int
    end: int
    taps: tuple[int, ...] = ()
    """Layers whose hidden states are outputs too, as `tap_N`."""


@dataclass(frozen=True)
class Artifact:
    """A validated manifest."""

    folder: Path
    name: str
    family: str
    task: str
    """`CAUSAL_LM` or `TOKEN_CLASSIFICATION`."""
    labels: tuple[str, ...]
    """Labels of a classifier; empty for other tasks."""
    window: int
    """Tokens that a classifier's rows attend to on each side; 0 for other tasks."""
    layers: int
    hidden_size: int
    stream_size: int
    """Channels between shards; the first `hidden_size` hold the embedding."""
    vocab_size: int
    slots: int
    rows: int
    """Most rows of a call."""
    functions: tuple[int, ...]
    """Numbers of rows N with a static function `tN`; empty: any number up to `rows`."""
    conv_slots: int
    """Size of the ring buffer of a convolution's recent rows."""
    lags: int
    """Earlier rows that a convolution reads."""
    layer_shards: tuple[Shard, ...]
    head_shards: tuple[Shard, ...]
    fingerprint: str
    """SHA-256 of the contents of all its files, hex."""

    @property
    def taps(self) -> tuple[int, ...]:
        """All tapped layers."""
        return tuple(tap for shard in self.layer_shards for tap in shard.taps)


class _Fact(NamedTuple):
    key: str
    least: int


_FACTS = (
    _Fact("layers", 1),
    _Fact("hidden_size", 1),
    _Fact("stream_size", 1),
    _Fact("vocab_size", 1),
    _Fact("slots", 1),
    _Fact("rows", 1),
    _Fact("ring", 0),
    _Fact("lags", 0),
    _Fact("reach", 0),
)


_FIELDS = {"reach": "window", "ring": "conv_slots"}
"""Manifest key -> field of `Artifact`, if they differ."""


def read_artifact(folder: Path) -> Artifact:
    """Read the artifact in `folder`; every file has its recorded size and checksum.

    Raises ModelError if it is no artifact or damaged; the message names every fault.
    """
    path = folder / MANIFEST
    value = read_json(path)
    if value.get("kind") != KIND or value.get("version") != VERSION:
        raise ModelError(
            f"{folder} is a {value.get('kind')} of version {value.get('version')}; expected a "
            f"{KIND} of version {VERSION}"
        )
    faults = list(_faults(value))
    if not faults:
        faults = list(_file_faults(folder, value["files"]))
    if faults:
        raise ModelError(
            f"{path} cannot be used: {'; '.join(faults)}; convert the model again, or copy it anew"
        )
    numbers = {_FIELDS.get(key, key): value[key] for key, _ in _FACTS}
    return Artifact(
        folder=folder,
        name=value["name"],
        family=value["family"],
        task=value["task"],
        labels=tuple(value["labels"]),
        functions=tuple(value["functions"]),
        layer_shards=tuple(_shards(value["layer_shards"])),
        head_shards=tuple(_shards(value["head_shards"])),
        fingerprint=value["fingerprint"],
        **numbers,
    )


def _shards(entries: Sequence[Mapping[str, Any]]) -> Iterator[Shard]:
    for entry in entries:
        yield Shard(entry["path"], entry["start"], entry["end"], tuple(entry.get("taps", ())))


def _faults(value: Mapping[str, Any]) -> Iterator[str]:
    for key in ("name", "family", "fingerprint"):
        if not isinstance(value.get(key), str):
            yield f"{key} is {value.get(key)!r}, expected a string"
    for key, least in _FACTS:
        if not _is_count(value.get(key)) or value[key] < least:
            yield f"{key} is {value.get(key)!r}, expected a number of {least} or more"
    functions = value.get("functions")
    if not isinstance(functions, list) or not all(map(_is_count, functions)):
        yield f"functions is {functions!r}, expected a list of numbers of rows"
    yield from _task_faults(value)
    files = value.get("files")
    if not isinstance(files, dict) or not files:
        yield "it lists no files"
    else:
        for name, record in files.items():
            if not _is_record(name, record):
                yield f"files has no size and SHA-256 for {name!r}, a path in this folder"
        yield from (f"files does not list {n}" for n in (EMBEDDINGS, ROTARY) if n not in files)
    for key, whole, what in (
        ("layer_shards", value.get("layers"), "layer"),
        ("head_shards", *_head_of(value)),
    ):
        yield from _shard_faults(value.get(key), whole, what, files)


def _task_faults(value: Mapping[str, Any]) -> Iterator[str]:
    task, labels = value.get("task"), value.get("labels")
    if task not in (CAUSAL_LM, TOKEN_CLASSIFICATION):
        yield f"task is {task!r}, expected {CAUSAL_LM} or {TOKEN_CLASSIFICATION}"
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        yield f"labels is {labels!r}, expected a list of strings"
        return
    if task == CAUSAL_LM and labels:
        yield f"it has {len(labels)} labels, expected none for the task {task}"
    if task != TOKEN_CLASSIFICATION:
        return
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if not labels or twice:
        yield f"it has the labels {labels!r}, expected at least one, and each once"
    if not value.get("reach"):
        yield f"reach is {value.get('reach')!r}, expected a number of 1 or more for the task {task}"
    functions, rows = value.get("functions"), value.get("rows")
    if isinstance(functions, list) and rows not in functions:
        yield f"functions is {functions!r}, expected one for {rows} rows for the task {task}"
    heads = value.get("head_shards")
    if isinstance(heads, list) and len(heads) > 1:
        yield f"it has {len(heads)} head_shards, expected one for the task {task}"
    slots: Any = value.get("slots")
    if _is_count(slots) and _is_count(rows) and slots < rows:
        yield f"slots is {slots}, expected at least the {rows} rows of a call for the task {task}"


def _head_of(value: Mapping[str, Any]) -> tuple[Any, str]:
    """Number of the head's rows, and what they are."""
    labels = value.get("labels")
    if value.get("task") == TOKEN_CLASSIFICATION:
        return len(labels) if isinstance(labels, list) else None, "label"
    return value.get("vocab_size"), "token"


def _shard_faults(entries: Any, whole: Any, what: str, files: Any) -> Iterator[str]:
    """Shards must exist and cover [0, whole) in order, without gap or overlap."""
    if not isinstance(entries, list) or not entries:
        yield f"there are no shards that hold {what}s"
        return
    reached = 0
    for entry in entries:
        if not (
            isinstance(entry, dict)
            and isinstance(entry.get("path"), str)
            and _is_count(entry.get("start"))
            and _is_count(entry.get("end"))
            and entry["start"] < entry["end"]
        ):
            yield f"{entry!r} is no shard: expected path, start and end, start before end"
            return
        path, start, end = entry["path"], entry["start"], entry["end"]
        if start > reached:
            yield f"{what}s {reached} to {start - 1} are in no shard: {path} begins at {start}"
        elif start < reached:
            yield f"{path} begins at {what} {start}, which the shard before it holds too"
        reached = end
        taps = entry.get("taps", [])
        if not isinstance(taps, list) or not all(_is_count(tap) for tap in taps):
            yield f"{path} has taps {taps!r}, expected a list of layers"
        elif any(not start <= tap < end for tap in taps):
            yield f"{path} has taps {taps!r}, not all of them layers from {start} to {end - 1}"
        if isinstance(files, dict) and not any(name.startswith(f"{path}/") for name in files):
            yield f"the files of {path} are not listed"
    if _is_count(whole) and reached != whole:
        yield f"the last shard ends at {what} {reached}, expected {whole}"


def _file_faults(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif (size := path.stat().st_size) != record["bytes"]:
            yield f"{name} has {size} bytes, expected {record['bytes']}"
        elif (found := sha256_of(path)) != record["sha256"]:
            yield f"{name} is not what was made: SHA-256 is {found}, expected {record['sha256']}"


def _is_record(name: object, record: object) -> bool:
    inside = isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
    return (
        inside
        and isinstance(record, dict)
        and _is_count(record.get("bytes"))
        and isinstance(record.get("sha256"), str)
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
