"""Downloads OpenVINO models, checkpoints and drafters from the Hugging Face hub.

The files are in huggingface_hub's own cache: downloads resume, and other tools share them.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ModelError, ModelNotFound
from paceline.models.manifest import GRAPH, REQUIRED
from paceline.models.progress import Progress

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class FileSet(NamedTuple):
    """Files to download for a hub name."""

    required: Sequence[str]
    """The first is fetched first: where it is missing, nothing else is fetched."""
    patterns: Sequence[str]
    """All files to fetch."""
    missing: str
    """Message where the first required file is missing; {} is the name."""


OPENVINO = FileSet(
    REQUIRED,
    ("openvino_model.*", "*.json", "*.jinja", "tokenizer.model"),
    f"{{0}} has no OpenVINO form on the hub ({GRAPH}); convert it once with "
    "`paceline convert {0} --to openvino --weights int8`",
)
CHECKPOINT = FileSet(
    ("config.json", "tokenizer.json"),
    ("*.json", "*.jinja", "*.safetensors"),
    "{0} has no config.json on the hub, so it is not a Hugging Face checkpoint",
)
DRAFTER = FileSet(
    ("config.json", "model.safetensors"),
    ("*.json", "*.safetensors", "*.npy"),
    "{0} has no config.json on the hub, so it is not a drafter",
)


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form owner/name."""
    return _NAME.fullmatch(name) is not None


def snapshot(name: str, progress: Progress, files: FileSet = OPENVINO) -> Path:
    """Folder of `name`, downloaded if it is not complete on this machine; see `fetch_snapshot`."""
    return cached_snapshot(name, files) or fetch_snapshot(name, progress, files)


def cached_snapshot(name: str, files: FileSet = OPENVINO) -> Path | None:
    """Folder of `name` if it is complete on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, file) for file in files.required]
    except HFValidationError:
        return None
    complete = all(isinstance(each, str) for each in found)  # not an interrupted download
    return Path(str(found[0])).parent if complete else None


def cached_names() -> list[str]:
    """Hub names of the OpenVINO models in the cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return []
    names = [repo.repo_id for repo in found.repos if repo.repo_type == "model"]
    return sorted(name for name in names if cached_snapshot(name) is not None)


def fetch_snapshot(name: str, progress: Progress, files: FileSet = OPENVINO) -> Path:
    """Download `name`, or only the changed files; returns its folder.

    Raises:
        ModelNotFound: the hub has no such model, or it is private.
        ModelError: required files are missing, the hub is unreachable, or writing fails.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # Its warnings repeat our error message.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not progress.is_shown:
        disable_progress_bars()
    progress.say(f"fetching {name} from the Hugging Face hub")
    try:
        hf_hub_download(name, files.required[0])
        return Path(snapshot_download(name, allow_patterns=list(files.patterns)))
    except GatedRepoError as error:
        raise ModelError(
            f"{name} has terms to accept on the hub: accept them there, then log in with "
            "`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model {name} (or it is private: log in with `hf auth login`)"
        ) from error
    except HFValidationError as error:
        raise ModelNotFound(f"{name} is not a hub name: {error}") from error
    except RemoteEntryNotFoundError as error:
        raise ModelError(files.missing.format(name)) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise _unreachable(name) from error
    except OSError as error:
        raise ModelError(f"cannot store {name}: {error}") from error
    except Exception as error:  # errors of the HTTP library, which may be any
        raise _unreachable(name) from error


def _unreachable(name: str) -> ModelError:
    return ModelError(
        f"cannot fetch {name}: the Hugging Face hub cannot be reached; check the network, or "
        "give the path of a model"
    )
