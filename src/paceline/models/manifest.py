"""Manifest of a prepared model: its name, source, facts, and the checksums of its files.

Invariant: the whole manifest is validated before any of it is used; one error names every fault.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

import paceline
from paceline.errors import ModelError
from paceline.storage import manifest
from paceline.storage.coreml import CORE_ML, fingerprint_of
from paceline.storage.files import read_json, size_of
from paceline.storage.manifest import MANIFEST, FileRecord, changed_contents, check_files
from paceline.storage.progress import QUIET, Progress
from paceline.storage.text import path_of
from paceline.storage.validation import Count, Positive, validated

KIND = "paceline-model"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
"""Sampling settings of a model's authors."""
GGUF_WEIGHTS = "model.gguf"
"""Weights made for a model, in the same folder."""
GGUF = "gguf file"
"""`kind` of a model whose weights stay in the GGUF file `from`; the folder has the rest."""


Pooling = Literal["mean", "first", "last"]
"""Rows of the last norm's output that make an embedding."""

Settings = Mapping[str, float | int]
"""Sampling settings: option of `paceline.Options` -> value."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a model that its engine and tokenizer need."""

    context_length: Positive
    """In tokens."""
    stop_token_ids: tuple[Count, ...]
    bos_token_id: Count | None
    add_bos: bool
    bos_token: str | None
    eos_token: str | None
    license: str | None
    pooling: Pooling | None = dataclasses.field(default=None, kw_only=True)
    """None: it makes no embeddings."""
    pooled_end: Count | None = dataclasses.field(default=None, kw_only=True)
    """Token at the end of a pooled text; None: any."""

    def __post_init__(self) -> None:
        """Raise ValueError if the token to add is missing."""
        if self.add_bos and self.bos_token_id is None:
            raise ValueError("add_bos is true but bos_token_id is missing")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`. `facts` are a separate object, or next to the other values."""

    kind: Literal["paceline-model", "coreml-model"]
    version: Literal[1]
    name: str
    source: dict[str, str]
    made_by: str
    facts: Facts
    files: dict[str, FileRecord]
    task: str = ""
    """For Core ML: "causal-lm", or the task of another kind of model."""

    @property
    def engine(self) -> str:
        return "coreml" if self.kind == CORE_ML else "llamacpp"

    def gguf(self, folder: Path) -> Path | None:
        """Return the GGUF file with graph and weights: in `folder`, or one stored elsewhere."""
        if self.source.get("kind") == GGUF:
            place = self.source["from"]
            if place.startswith("file://"):
                place = unquote(place.removeprefix("file://"), errors="surrogateescape")
            return path_of(place)
        return folder / GGUF_WEIGHTS if GGUF_WEIGHTS in self.files else None

    @property
    def fingerprint(self) -> str:
        """Identity of the weights: equal only for equal bytes.

        For a GGUF file, only name, size, time and inode are compared: hashing takes too long.
        """
        if self.source.get("kind") == GGUF:
            return self.source["fingerprint"]
        if GGUF_WEIGHTS in self.files:
            return self.files[GGUF_WEIGHTS].sha256
        return fingerprint_of({name: record.sha256 for name, record in self.files.items()})


def write_manifest(
    folder: Path, name: str, source: Mapping[str, str], facts: Facts, progress: Progress = QUIET
) -> None:
    """Hash every file in the finished `folder` and write `manifest.json`."""
    files = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    value = {"name": name, "source": dict(source), "made_by": f"paceline {paceline.__version__}"}
    value["facts"] = dataclasses.asdict(facts)
    with progress.task(f"checksums of {name}", size_of(folder)) as update:
        manifest.write_manifest(folder, KIND, value, files, update)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of `folder`; every file is present with its recorded size.

    In a Core ML model, only the fields that all models have are checked; its engine checks the
    rest. Contents are not hashed: see `changed_files`. Raises ModelError that names every fault.
    """
    path = folder / MANIFEST
    value = read_json(path)
    value = {"facts": value, "kind": value.get("format"), **value}
    stored = validated(Manifest, value, str(path), error=ModelError)
    source = stored.source
    gguf = source.get("kind") == GGUF
    if gguf and (missing := [key for key in ("from", "fingerprint") if key not in source]):
        raise ModelError(f"{path}: source has no {' and no '.join(missing)}; remove {folder}")
    weights = () if stored.kind == CORE_ML or gguf else (GGUF_WEIGHTS,)
    check_files(folder, stored.files, required=(TOKENIZER, *weights))
    return stored


def changed_files(folder: Path, manifest: Manifest, progress: Progress = QUIET) -> list[str]:
    """List faults of the files in `folder` whose checksums differ from the manifest's."""
    total = sum(record.bytes for record in manifest.files.values())
    with progress.task(f"checking {manifest.name}", total) as update:
        return changed_contents(folder, manifest.files, update)
