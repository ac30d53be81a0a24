"""Models that others exported for OpenVINO, from the Hugging Face hub.

Knows huggingface_hub, whose own cache keeps them: downloads resume, and other tools share the
files. Knows nothing about what is in a snapshot.
"""

import logging
import re
from pathlib import Path

from paceline.errors import ModelError, ModelNotFound
from paceline.models.manifest import GRAPH, REQUIRED
from paceline.models.progress import Progress

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_WANTED = ("openvino_model.*", "*.json", "*.jinja", "tokenizer.model")


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form owner/name."""
    return _NAME.fullmatch(name) is not None


def cached_snapshot(name: str) -> Path | None:
    """The folder of a whole OpenVINO model that is already on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, piece) for piece in REQUIRED]
    except HFValidationError:
        return None
    # A download that was interrupted has some of them.
    whole = all(isinstance(each, str) for each in found)
    return Path(str(found[0])).parent if whole else None


def cached_names() -> list[str]:
    """The hub names whose OpenVINO graphs are on this machine."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return []
    names = [repo.repo_id for repo in found.repos if repo.repo_type == "model"]
    return sorted(name for name in names if cached_snapshot(name) is not None)


def fetch_snapshot(name: str, progress: Progress) -> Path:
    """Download the OpenVINO model `name`, or what is new in it; returns its folder.

    Raises ModelNotFound when the hub has no such model for us, ModelError when it has no OpenVINO
    form, cannot be reached, or what it sends cannot be kept.
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

    # Its warnings repeat what our one line says.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not progress.watched:
        disable_progress_bars()
    progress.say(f"fetching {name} from the Hugging Face hub")
    try:
        hf_hub_download(name, GRAPH)  # first, as it says at once when there is none
        return Path(snapshot_download(name, allow_patterns=list(_WANTED)))
    except GatedRepoError as error:
        raise ModelError(
            f"{name} asks for consent on the hub: accept its terms there, then log in with "
            "`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model {name} (or it is private: log in with `hf auth login`)"
        ) from error
    except HFValidationError as error:
        raise ModelNotFound(f"{name} is not a hub name: {error}") from error
    except RemoteEntryNotFoundError as error:
        raise ModelError(
            f"{name} has no OpenVINO form on the hub ({GRAPH}); convert it once with "
            f"`paceline convert {name} --to openvino --weights int8`"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise _unreachable(name) from error
    except OSError as error:
        raise ModelError(f"cannot keep {name}: {error}") from error
    except Exception as error:  # the transport's own, whose library is not ours to know
        raise _unreachable(name) from error


def _unreachable(name: str) -> ModelError:
    return ModelError(
        f"cannot fetch {name}: the Hugging Face hub cannot be reached; check the network, or "
        "give the path of a model"
    )
