"""Names in a Core ML model folder, and its fingerprint, for the model list and the engines."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from paceline.errors import ModelError
from paceline.storage.files import read_json
from paceline.storage.manifest import MANIFEST

CORE_ML = "coreml-model"
"""Kind in its manifest."""
EMBEDDINGS = "embeddings.npy"
"""[vocab, hidden_size] float16."""

MAKING = "making.json"
"""The file of an unfinished conversion."""


def is_core_ml(folder: Path) -> bool:
    """Return whether a folder has the manifest of packages for Core ML."""
    try:
        return bool(read_json(folder / MANIFEST).get("kind") == CORE_ML)
    except ModelError:
        return False


def fingerprint_of(checksums: Mapping[str, str]) -> str:
    """SHA-256 of all file names and checksums, hex."""
    lines = "\n".join(f"{name} {checksums[name]}" for name in sorted(checksums))
    return sha256(lines.encode()).hexdigest()
