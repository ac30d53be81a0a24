"""Core ML artifacts of random tiny models."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.models import QUIET
from paceline.models.manifest import Facts
from paceline.storage.coreml import CORE_ML, fingerprint_of
from paceline.storage.files import read_json, sha256_of, write_json
from paceline.storage.manifest import MANIFEST
from paceline.system.machine import lock_path

FACTS = Facts(
    context_length=512,
    stop_token_ids=(1,),
    bos_token_id=None,
    add_bos=False,
    bos_token=None,
    eos_token=None,
    license=None,
)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
}


def tiny_llama(folder: Path, **changes: Any) -> Path:
    """A random Llama as a Hugging Face checkpoint."""
    from support.coreml_families import TinyModel

    return TinyModel("llama", folder, **{**SIZES, "head_dim": 16, **changes}).folder


SMALLER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
}
"""For tests with thousands of calls: the time of a call is that of its operations."""


FLEXIBLE = {"flexible": True, "rows": 4}
STATIC = {"functions": (2, 4), "topology": "3"}
"""Options of `tiny_artifact` with a static function for two rows and one for four."""


def tiny_source(folder: Path, checkpoint: Path | None = None, **changes: Any) -> Any:
    """`tiny_llama`, or another checkpoint, as a `Source` with an empty tokenizer."""
    from paceline_coreml.conversion.source import Source

    checkpoint = checkpoint or tiny_llama(folder / "checkpoint", **changes)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text("{}")
    about = {"kind": "checkpoint", "from": "tiny"}
    return Source("tiny", about, "tiny", checkpoint, tokenizer, None, FACTS)


def tiny_artifact(folder: Path, **options: Any) -> Path:
    """An artifact of `tiny_llama` in two packages of layers and two of the head."""
    settings = {"topology": "2+1", "head_rows": 100, "slots": 192, **options}
    return convert_source(tiny_source(folder), folder / "artifact", **settings)


def convert_source(source: Any, out: Path, **settings: Any) -> Path:
    """Return its artifact: flexible, unless static functions are requested."""
    from paceline_coreml.conversion.convert import convert
    from paceline_coreml.options import ConversionOptions

    if "functions" not in settings:
        settings = FLEXIBLE | settings
    return convert(source, out, ConversionOptions(**settings), progress=QUIET).folder


def converted_once(shared: Path, convert: Callable[..., Path], **options: Any) -> Path:
    """`convert(folder, **options)`, once for all processes that share a folder.

    A conversion takes seconds; treat the artifact as read-only.
    """
    recipe = f"{convert.__name__} {sorted(options.items())}"
    place = shared / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    release = lock_path(place, wait=True)
    assert release is not None
    try:
        artifact = place / "artifact"
        # What another process did not finish is resumed.
        return artifact if (artifact / MANIFEST).exists() else convert(place, **options)
    finally:
        release()


def written_artifact(folder: Path, **changes: Any) -> Path:
    """An artifact whose packages hold a few bytes each: only names and checksums are looked at."""
    value: dict[str, Any] = {
        **{"kind": CORE_ML, "version": 1, "name": "tiny", "family": "llama", "task": "causal-lm"},
        **{"labels": [], "reach": 0, "layers": 3, "hidden_size": 8, "stream_size": 8},
        **{"vocab_size": 160, "slots": 64, "rows": 4, "functions": [], "ring": 0, "lags": 0},
        "layer_shards": [
            {"path": "layers-000-002.mlpackage", "start": 0, "end": 2, "taps": [1]},
            {"path": "layers-002-003.mlpackage", "start": 2, "end": 3},
        ],
        "head_shards": [
            {"path": "head-000000-000100.mlpackage", "start": 0, "end": 100},
            {"path": "head-000100-000160.mlpackage", "start": 100, "end": 160},
        ],
        **changes,
    }
    for shard in (*value["layer_shards"], *value["head_shards"]):
        package = folder / shard["path"]
        package.mkdir(parents=True)
        (package / "Manifest.json").write_text(f'{{"of": "{shard["path"]}"}}')
    np.save(folder / "embeddings.npy", np.zeros((160, 8), np.float16))
    np.save(folder / "rotary.npy", np.zeros((2, 64, 4), np.float32))
    write_json(folder / MANIFEST, value)
    seal(folder)
    return folder


def seal(folder: Path, **changes: Any) -> None:
    """Make a manifest's checksums agree with the files, so that they do not show a fault."""
    value = read_json(folder / MANIFEST)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
        }
        for path in paths
    }
    fingerprint = fingerprint_of({name: file["sha256"] for name, file in files.items()})
    write_json(folder / MANIFEST, {**value, **changes, "files": files, "fingerprint": fingerprint})
