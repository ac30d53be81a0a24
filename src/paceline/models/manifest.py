"""The manifest of a prepared model: what it is, from what, by which version, with checksums.

Knows the shape of `manifest.json` and of the folder around it. Knows nothing about where models
come from. The rule: a manifest is validated whole before anything is used, and every fault is
named at once.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import paceline
from paceline.errors import ModelError
from paceline.models.progress import QUIET, Progress
from paceline.storage.coreml import CORE_ML
from paceline.storage.files import read_json, sha256_of
from paceline.storage.manifest import MANIFEST

FORMAT = "paceline-model"
VERSION = 1
GRAPH = "openvino_model.xml"
WEIGHTS = "openvino_model.bin"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
REQUIRED = (GRAPH, WEIGHTS, TOKENIZER)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What has to be known about a model besides its files."""

    context_length: int  # tokens
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool
    bos_token: str | None
    eos_token: str | None
    license: str | None


class FileRecord(NamedTuple):
    """One file as it was when the manifest was written."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A prepared model's own description. `source` says what it was made from."""

    name: str
    source: Mapping[str, str]
    made_by: str
    facts: Facts
    files: Mapping[str, FileRecord]
    engine: str = "openvino"
    """Who can run it."""

    @property
    def fingerprint(self) -> str:
        """The identity of the program and its weights: equal only for equal bytes."""
        # A Core ML model's program is in many files, and how they go together in its manifest.
        names = (GRAPH, WEIGHTS) if self.engine == "openvino" else sorted(self.files)
        text = " ".join(self.files[name].sha256 for name in names)
        return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(
    folder: Path, name: str, source: Mapping[str, str], facts: Facts, progress: Progress = QUIET
) -> None:
    """Describe the finished `folder`: hash every file in it and write `manifest.json`."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    sizes = {path.name: path.stat().st_size for path in paths}
    hashes: dict[str, str] = {}
    with progress.task(f"checksums of {name}", sum(sizes.values())) as reach:
        done = 0
        for path in paths:
            hashes[path.name] = sha256_of(path, reach, done)
            done += sizes[path.name]
    value = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "source": dict(source),
        "made_by": f"paceline {paceline.__version__}",
        **dataclasses.asdict(facts),
        "files": {n: {"bytes": sizes[n], "sha256": hashes[n]} for n in sizes},
    }
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, validated, with every file present and of the recorded size.

    Of a Core ML model only what all models have is looked at; its engine looks at the rest.
    Contents are not hashed: that is `changed_files`. Raises ModelError that names every fault.
    """
    value = read_json(folder / MANIFEST)
    core_ml = value.get("kind") == CORE_ML
    if core_ml:
        facts = value.get("facts")
        value = {**(facts if isinstance(facts, dict) else {}), **value}
    faults = _shape_faults(value, core_ml=core_ml)
    if not faults:
        faults = _file_faults(folder, value["files"])
    if faults:
        raise ModelError(f"{folder / MANIFEST} cannot be used: {'; '.join(faults)}")
    facts = {field.name: value[field.name] for field in dataclasses.fields(Facts)}
    facts["stop_token_ids"] = tuple(facts["stop_token_ids"])
    return Manifest(
        name=value["name"],
        source=value["source"],
        made_by=value["made_by"],
        facts=Facts(**facts),
        files={n: FileRecord(f["bytes"], f["sha256"]) for n, f in value["files"].items()},
        engine="coreml" if core_ml else "openvino",
    )


def changed_files(folder: Path, manifest: Manifest, progress: Progress = QUIET) -> list[str]:
    """The files of `folder` whose contents are not what the manifest recorded, with why."""
    faults: list[str] = []
    total, done = sum(record.bytes for record in manifest.files.values()), 0
    with progress.task(f"checking {manifest.name}", total) as reach:
        for name, record in manifest.files.items():
            found = sha256_of(folder / name, reach, done)
            done += record.bytes
            if found != record.sha256:
                faults.append(f"{name}: SHA-256 is {found}, expected {record.sha256}")
    return faults


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_text_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


class _Rule(NamedTuple):
    expected: str
    holds: Callable[[Any], bool]


_RULES: Mapping[str, _Rule] = {
    "format": _Rule(repr(FORMAT), lambda value: value == FORMAT),
    "version": _Rule(str(VERSION), lambda value: value == VERSION),
    "name": _Rule("a string", lambda value: isinstance(value, str)),
    "source": _Rule("an object of strings", _is_text_map),
    "made_by": _Rule("a string", lambda value: isinstance(value, str)),
    "context_length": _Rule("tokens, 1 or more", lambda value: _is_count(value) and value > 0),
    "stop_token_ids": _Rule(
        "a list of token ids", lambda value: isinstance(value, list) and all(map(_is_count, value))
    ),
    "bos_token_id": _Rule("a token id or null", lambda value: value is None or _is_count(value)),
    "add_bos": _Rule("true or false", lambda value: isinstance(value, bool)),
    "bos_token": _Rule("a string or null", _is_text_or_none),
    "eos_token": _Rule("a string or null", _is_text_or_none),
    "license": _Rule("a string or null", _is_text_or_none),
    "files": _Rule("an object", lambda value: isinstance(value, dict)),
}


def _shape_faults(value: Mapping[str, Any], *, core_ml: bool) -> list[str]:
    faults = [
        f"{key} is missing" if key not in value else f"{key} is {value[key]!r}, expected {expected}"
        for key, (expected, holds) in _RULES.items()
        if not (core_ml and key == "format") and (key not in value or not holds(value[key]))
    ]
    files = value.get("files")
    if isinstance(files, dict):
        required = (TOKENIZER,) if core_ml else REQUIRED
        faults += [f"files does not list {name}" for name in required if name not in files]
        faults += [fault for name, record in files.items() for fault in _entry_faults(name, record)]
    if value.get("add_bos") is True and value.get("bos_token_id") is None:
        faults.append("add_bos is true but there is no bos_token_id")
    return faults


def _entry_faults(name: str, record: object) -> Sequence[str]:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return [f"files names {name!r}, expected a file in this folder"]
    if not isinstance(record, dict) or not _is_count(record.get("bytes")):
        return [f"files has no size for {name}"]
    if not isinstance(record.get("sha256"), str) or len(record["sha256"]) != 64:
        return [f"files has no SHA-256 for {name}"]
    return []


def _file_faults(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    faults: list[str] = []
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif (size := path.stat().st_size) != record["bytes"]:
            faults.append(f"{name} has {size} bytes, expected {record['bytes']}")
    return faults
