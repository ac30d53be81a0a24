"""Models in a folder with Ollama's layout."""

import hashlib
import json
from pathlib import Path
from typing import Any

MODEL_LAYER = "application/vnd.ollama.image.model"


def pulled(ollama: Path, name: str, content: bytes = b"GGUF", **other: Any) -> Path:
    """A model as ollama keeps it: `name` is host/namespace/name/tag. Returns its blob."""
    digest = hashlib.sha256(content + name.encode()).hexdigest()
    blob = ollama / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    manifest = ollama / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": MODEL_LAYER, "digest": f"sha256:{digest}", "size": len(content)},
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:x", "size": 1},
    ]
    value = {"schemaVersion": 2, "config": {"digest": "sha256:y"}, "layers": layers, **other}
    manifest.write_text(json.dumps(value))
    return blob
