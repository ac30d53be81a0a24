"""Models that others exported for OpenVINO, and drafters, from the Hugging Face hub.

Knows huggingface_hub, whose own cache keeps them: downloads resume, and other tools share the
files. Knows nothing about what is in a snapshot.
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


class Form(NamedTuple):
    """What is looked for under a hub name."""

    required: Sequence[str]
    """Files it must have; the first is fetched first, as it says at once when there is none."""
    wanted: Sequence[str]
    """Patterns of all that is fetched."""
    missing: str
    """What to say where the first is not there; {} is the name."""


OPENVINO = Form(
    REQUIRED,
    ("openvino_model.*", "*.json", "*.jinja", "tokenizer.model"),
    f"{{0}} has no OpenVINO form on the hub ({GRAPH}); convert it once with "
    "`paceline convert {0} --to openvino --weights int8`",
)
CHECKPOINT = Form(
    ("config.json", "tokenizer.json"),
    ("*.json", "*.jinja", "*.safetensors"),
    "{0} has no config.json on the hub, so it is no Hugging Face checkpoint",
)
DRAFTER = Form(
    ("config.json", "model.safetensors"),
    ("*.json", "*.safetensors", "*.npy"),
    "{0} has no config.json on the hub, so it is no drafter",
)


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form owner/name."""
    return _NAME.fullmatch(name) is not None


def cached_snapshot(name: str, form: Form = OPENVINO) -> Path | None:
    """The folder of what is already whole on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, piece) for piece in form.required]
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


def fetch_snapshot(name: str, progress: Progress, form: Form = OPENVINO) -> Path:
    """Download `name`, or what is new in it; returns its folder.

    Raises ModelNotFound when the hub has no such model for us, ModelError when it has not this
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
        hf_hub_download(name, form.required[0])
        return Path(snapshot_download(name, allow_patterns=list(form.wanted)))
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
        raise ModelError(form.missing.format(name)) from error
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
