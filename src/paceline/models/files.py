"""Opens model folders: those paceline prepared (with a manifest), and checkpoints.

Independent of downloads and conversion.
Invariant: one error names all missing files of a folder.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.errors import ModelError
from paceline.models import checkpoints
from paceline.models.hub import instead
from paceline.models.manifest import TOKENIZER, Facts, Settings, changed_files, read_manifest
from paceline.models.templates import ChatTemplate
from paceline.models.templates.control_text import ControlText
from paceline.models.templates.marks import Thinking
from paceline.models.templates.tokenizer import Tokenizer
from paceline.storage.coreml import MAKING
from paceline.storage.files import check_no_pointer, size_of
from paceline.storage.manifest import MANIFEST, is_checked
from paceline.storage.progress import QUIET, Progress
from paceline.storage.shards import shards_beside
from paceline.storage.text import text_bytes


@dataclass(frozen=True)
class ModelFiles:
    """An installed model that an engine can open."""

    name: str
    """The name that the user gave."""
    folder: Path
    facts: Facts
    fingerprint: str
    """Fingerprint of graph and weights, hex; the same in every run."""
    chat_template: str | None
    source: str
    """Its source, for display."""
    engine: str = "llamacpp"
    weights: Path | None = None
    """The GGUF file that the engine opens; None for a model in another format."""
    classifies: bool = False
    """True if it labels the tokens of texts, and generates none."""

    @cached_property
    def short_name(self) -> str:
        """The name shown to clients: without the folders of a path."""
        path = Path(self.name)
        return path.name.removesuffix(".gguf") if path.exists() else self.name

    @property
    def context_length(self) -> int:
        return self.facts.context_length

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.facts.stop_token_ids

    @property
    def path(self) -> Path:
        """The path that its engine opens: a GGUF file, or the folder."""
        return self.weights or self.folder

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of the files that its engine opens."""
        # Models in the Hugging Face cache are links to blobs.
        return sum(size_of(path, links=True) for path in shards_beside(self.path))

    @property
    def settings(self) -> Settings:
        """The authors' sampling settings. Raises ModelError for invalid values."""
        return checkpoints.read_generation_config(self.folder)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read at first use. Raises ModelError if it cannot be read."""
        path = self.folder / TOKENIZER
        return Tokenizer(path, bos_token_id=self.facts.bos_token_id, add_bos=self.facts.add_bos)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, compiled at first use. Raises ModelError if there is none."""
        if self.classifies:
            raise ModelError(f"{self.name} labels texts; use it with `paceline classify`")
        return ChatTemplate(
            self.chat_template,
            bos_token=self.facts.bos_token,
            eos_token=self.facts.eos_token,
            model=self.short_name,
        )

    @cached_property
    def thinking(self) -> Thinking:
        """The model's reasoning format, and the template variables that turn reasoning off."""
        return Thinking(self.chat_template, self.tokenizer, self.short_name)

    @cached_property
    def control_text(self) -> ControlText:
        """The guard that keeps text in messages from becoming control tokens."""
        return ControlText(self.tokenizer, self.chat_template, self.thinking)


def open_folder(folder: Path, name: str, progress: Progress | None = None) -> ModelFiles:
    """Open the model in `folder`, without copying it; checkpoints only if MLX is available.

    With `progress`, files of a prepared model that have changed since they were hashed are hashed
    again. Raises ModelError, which names every missing or changed file, or how to use another
    kind of model.
    """
    if checkpoints.is_checkpoint(folder) and checkpoints.mlx_available():
        return open_checkpoint(folder, name)
    if (folder / MANIFEST).exists():
        return _prepared(folder, name, progress)
    raise ModelError(_not_a_model(folder))


def open_checkpoint(folder: Path, name: str) -> ModelFiles:
    """Open the checkpoint in `folder`. Raises ModelError if files are missing or invalid."""
    checkpoints.check_complete(folder)
    weights = [folder / "config.json", *sorted(folder.glob("model*.safetensors"))]
    for path in weights:
        with path.open("rb") as file:
            check_no_pointer(path, file.read(64))
    facts, template = checkpoints.read_facts(folder), checkpoints.read_template(folder)
    return ModelFiles(name, folder, facts, stat_fingerprint(weights), template, str(folder), "mlx")


def _prepared(folder: Path, name: str, progress: Progress | None) -> ModelFiles:
    manifest = read_manifest(folder)
    hashed = progress is None or is_checked(folder, manifest.files)
    if not hashed and (faults := changed_files(folder, manifest, progress or QUIET)):
        raise ModelError(
            f"{folder} is damaged: {'; '.join(faults)}; remove this folder, and the next command "
            "creates it again (if you copied or converted it yourself, repeat that)"
        )
    weights = manifest.gguf(folder)
    if weights is not None and not weights.is_file():
        raise ModelError(f"{weights} is missing; {folder} depends on it and can be removed")
    kind = manifest.source.get("kind", "unknown")
    hidden = ("kind", "sha256", "fingerprint")
    rest = " ".join(text for key, text in manifest.source.items() if key not in hidden)
    return ModelFiles(
        name,
        folder,
        manifest.facts,
        manifest.fingerprint,
        checkpoints.read_template(folder),
        f"{kind}: {rest}",
        manifest.engine,
        weights,
        manifest.task == "token-classification",
    )


def _not_a_model(folder: Path) -> str:
    """Return why a folder cannot be opened as a model, and what to use instead."""
    if any(folder.glob("*.safetensors")):
        if (folder / "config.json").is_file():
            return f"{folder} is {instead()}"
    elif old := sorted(folder.glob("pytorch_model*.bin")):
        return f"{folder} has {old[0].name}; {checkpoints.ONLY_SAFETENSORS}"
    if ggufs := sorted(folder.glob("*.gguf")):
        return f"{folder} is a folder; to use its GGUF file, give the path {ggufs[0]}"
    if (folder / MAKING).is_file():
        return f"{folder} is an unfinished conversion; run the same `paceline convert` to finish it"
    if (folder / "openvino_model.xml").is_file():
        return f"{folder} is an OpenVINO model, which paceline does not run; use its GGUF version"
    return (
        f"{folder} is not a model: expected a GGUF file, or a folder with config.json and "
        "safetensors"
    )


def stat_fingerprint(paths: Iterable[Path]) -> str:
    """Identify files by names, sizes, times and inodes, in hex: hashing takes too long."""
    digest = hashlib.sha256()
    for path in paths:
        stat = path.stat()
        values = f"{path.name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}\n"
        digest.update(text_bytes(values))
    return digest.hexdigest()
