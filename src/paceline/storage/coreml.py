"""Names in a Core ML model folder, and its fingerprint, for the model list and the engines."""

from collections.abc import Mapping
from hashlib import sha256

CORE_ML = "coreml-model"
"""Kind in its manifest."""
EMBEDDINGS = "embeddings.npy"
"""[vocab, hidden_size] float16."""


def fingerprint_of(checksums: Mapping[str, str]) -> str:
    """SHA-256 of all file names and checksums, hex."""
    lines = "\n".join(f"{name} {checksums[name]}" for name in sorted(checksums))
    return sha256(lines.encode()).hexdigest()
